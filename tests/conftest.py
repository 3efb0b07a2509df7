"""Settings of all tests."""

from hypothesis import settings

# An example may take long on a busy machine, where tests of several processes share two cores.
settings.register_profile("any-machine", settings(), deadline=None)
settings.load_profile("any-machine")
