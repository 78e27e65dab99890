"""What holds for every test: a shared machine may be slow at any moment, so no property has a deadline."""

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
