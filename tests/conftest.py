from hypothesis import settings

# A shared machine may stall any single example.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
