"""A model of seven million parameters that ships with the project: how it was made, what it can
do."""

from pathlib import Path

MODEL = str(Path(__file__).with_name("model"))  # a directory in the Hugging Face layout
