"""Settings of hypothesis for all unit tests: the same examples in every run."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")
