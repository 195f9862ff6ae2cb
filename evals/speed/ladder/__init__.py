"""A ladder of configurations, one variable apart each, and what each step did."""
