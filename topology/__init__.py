"""Where a run takes place: devices, links, nodes, fabrics, and the routes between them."""
