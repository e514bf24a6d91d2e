"""Both runs together: predictions held against measurements, and fits."""
