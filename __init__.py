"""exatwin: a digital twin of cluster training.

``exatwin.scenarios`` says what is asked, ``exatwin.topology`` where it runs,
``exatwin.sim`` predicts it, ``exatwin.twin`` holds the prediction against
measurements, and ``exatwin.report`` shows the answer.
"""

from ._version import __version__

__all__ = ["__version__"]
