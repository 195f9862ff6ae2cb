"""Which shapes are captured once and replayed."""
