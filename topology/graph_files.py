"""Graphs in files: GraphML, node-link JSON, and plain lists of edges.

Vertices of our own graphs are tuples, such as ``("device", 3)``; in a file they
are words, ``device:3``.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import input_error
from .files import read_text
from .units import bandwidth

if TYPE_CHECKING:
    import networkx as nx

GRAPH_SUFFIXES = (".graphml", ".json", ".edges")
MOST_VERTICES = 20_000  # of a user's graph: routes over it are searched for, not computed


def vertex_name(vertex: Any) -> str:
    """A vertex as a word.

    >>> vertex_name(("leaf", 3, 0)), vertex_name("core")
    ('leaf:3:0', 'core')
    """
    return ":".join(map(str, vertex)) if isinstance(vertex, tuple) else str(vertex)


def write_graph(graph: nx.Graph, path: str | Path) -> None:
    """Write a graph in the form that its ending says: ``.graphml``, ``.json`` (node-link) or ``.edges``.

    Raises:
        InputError: If the ending is another, or the file cannot be written.
    """
    import networkx as nx

    path = Path(path)
    _check_suffix(path)
    named = nx.Graph()
    named.graph.update({key: value for key, value in graph.graph.items() if isinstance(value, (str, int, float))})
    named.add_nodes_from((vertex_name(vertex), data) for vertex, data in graph.nodes(data=True))
    named.add_edges_from((vertex_name(a), vertex_name(b), data) for a, b, data in graph.edges(data=True))
    if path.suffix == ".graphml":
        text = "\n".join(nx.generate_graphml(named)) + "\n"
    elif path.suffix == ".json":
        text = json.dumps(_node_link(named), indent=1) + "\n"
    else:
        rows = (f"{a} {b} x{edge.get('count', 1):g}{_bandwidth_word(edge)}" for a, b, edge in named.edges(data=True))
        text = "\n".join(["# vertex vertex xCOUNT bandwidth of one link, one direction", *rows]) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise input_error(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def read_graph(path: str | Path) -> nx.Graph:
    """A graph from a file; parallel edges become one with their count.

    An edge may have a ``count`` of links (1 where it says none), and either ``bandwidth`` of
    one of them as text with its unit or ``bandwidth_bytes_per_s`` of them all.

    Raises:
        InputError: If the file is missing, cut short, of another form, or says what cannot be.
    """
    import networkx as nx

    path, where = Path(path), str(path)
    _check_suffix(path)
    text = read_text(path, where)
    if not text.strip():
        raise input_error("is empty", where=where)
    if path.suffix == ".edges":
        edges = [_edge(line, number, where) for number, line in enumerate(text.splitlines(), 1)]
        vertices: list[tuple[str, dict[str, Any]]] = []
        rows = [edge for edge in edges if edge is not None]
    elif path.suffix == ".json":
        vertices, rows = _read_node_link(text, where)
    else:
        vertices, rows = _read_graphml(text, where)
    graph = nx.Graph()
    graph.add_nodes_from(vertices)
    for a, b, data in rows:
        if a == b:
            raise input_error(f"joins {a} to itself", where=where)
        edge = _weighed(data, f"{a} - {b}", where)
        if graph.has_edge(a, b):
            known = graph.edges[a, b]
            if ("bandwidth_bytes_per_s" in known) != ("bandwidth_bytes_per_s" in edge):
                raise input_error(f"edge {a} - {b} stands twice, once without its bandwidth", where=where)
            for key in edge.keys() & {"count", "bandwidth_bytes_per_s"}:
                edge[key] += known[key]
        graph.add_edge(a, b, **edge)
    if graph.number_of_nodes() > MOST_VERTICES:
        raise input_error(f"has {graph.number_of_nodes()} vertices; at most {MOST_VERTICES} are read", where=where)
    return graph


def _check_suffix(path: Path) -> None:
    if path.suffix not in GRAPH_SUFFIXES:
        raise input_error(f"a graph file ends in {', '.join(GRAPH_SUFFIXES)}, not {path.suffix!r}", where=str(path))


def _node_link(graph: nx.Graph) -> dict[str, Any]:
    return {
        "directed": False,
        "multigraph": False,
        "graph": dict(graph.graph),
        "nodes": [{**data, "id": vertex} for vertex, data in graph.nodes(data=True)],
        "links": [{**data, "source": a, "target": b} for a, b, data in graph.edges(data=True)],
    }


Rows = list[tuple[str, str, dict[str, Any]]]


def _read_node_link(text: str, where: str) -> tuple[list[tuple[str, dict[str, Any]]], Rows]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "too deep"
        raise input_error(f"is not valid JSON: {reason}", where=where) from None
    links = document.get("links", document.get("edges")) if isinstance(document, dict) else None
    if not isinstance(links, list) or not isinstance(document.get("nodes"), list):
        raise input_error("is no node-link graph: it needs the lists 'nodes' and 'links'", where=where)
    vertices = []
    for entry in document["nodes"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), (str, int)):
            raise input_error("has a node without an id", where=where)
        vertices.append((str(entry["id"]), {key: value for key, value in entry.items() if key != "id"}))
    known = {vertex for vertex, _ in vertices}
    rows: Rows = []
    for entry in links:
        if not isinstance(entry, dict) or not {"source", "target"} <= entry.keys():
            raise input_error("has a link without source and target", where=where)
        ends = str(entry["source"]), str(entry["target"])
        for end in ends:
            if end not in known:
                raise input_error(f"has a link to {end[:60]}, which is none of its nodes", where=where)
        rows.append((*ends, {key: value for key, value in entry.items() if key not in ("source", "target", "key")}))
    return vertices, rows


def _read_graphml(text: str, where: str) -> tuple[list[tuple[str, dict[str, Any]]], Rows]:
    import networkx as nx

    try:
        graph = nx.read_graphml(io.BytesIO(text.encode()))
    except Exception as error:  # the parser's own kinds, and KeyError, for XML that is no GraphML
        raise input_error(f"is not valid GraphML: {' '.join(str(error).split())[:120]}", where=where) from None
    vertices = [(str(vertex), dict(data)) for vertex, data in graph.nodes(data=True)]
    return vertices, [(str(a), str(b), dict(data)) for a, b, data in graph.edges(data=True)]


def _edge(line: str, number: int, where: str) -> tuple[str, str, dict[str, Any]] | None:
    """One line of a list of edges: two vertices, ``x4`` for four links, and one link's bandwidth."""
    words = line.partition("#")[0].split()
    if not words:
        return None
    asked = "write an edge like 'node:0 leaf:0 x2 25GB/s'"
    if len(words) < 2:
        raise input_error(f"line {number}: one vertex is no edge; {asked}", where=where)
    a, b, *rest = words
    data: dict[str, Any] = {}
    if rest and rest[0].startswith("x"):
        try:
            data["count"] = float(rest.pop(0)[1:])
        except ValueError:
            raise input_error(f"line {number}: {words[2]} is no count of links; {asked}", where=where) from None
    if rest:
        data["bandwidth"] = " ".join(rest)
    return a, b, data


def _weighed(data: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """An edge's data with its count and, where it says one, the bandwidth of all its links."""
    count = data.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, (int, float)) or not 0 < count < 1e9:
        raise input_error(f"edge {name} has the count {count!r}; a count is above 0", where=where)
    edge = {key: value for key, value in data.items() if key != "bandwidth"} | {"count": count}
    if "bandwidth" in data:
        try:
            edge["bandwidth_bytes_per_s"] = count * bandwidth(data["bandwidth"])
        except ValueError as error:
            raise input_error(f"edge {name}: {error}", where=where) from None
    if "bandwidth_bytes_per_s" in edge:
        value = edge["bandwidth_bytes_per_s"]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
            raise input_error(f"edge {name} has the bandwidth {value!r}; it is above 0", where=where)
    return edge


def _bandwidth_word(edge: dict[str, Any]) -> str:
    if "bandwidth_bytes_per_s" not in edge:
        return ""
    return f" {edge['bandwidth_bytes_per_s'] / edge.get('count', 1):.17g}B/s"
