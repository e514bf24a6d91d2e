"""Settings of every test."""

import os

from hypothesis import settings

# A loaded machine is slow, which is no failure; the continuous integration tries the same examples each time.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
