"""The suites: what each measures, for how long at most, and which plots its rows make."""
