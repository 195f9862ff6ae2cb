"""Real checkpoints against transformers: `pytest -m real --models DIR`, DIR holding Hugging Face
directories."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core import Engine, SamplingParams

pytestmark = pytest.mark.real

NEW_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "Water boils at 100 degrees Celsius because",
    "# A function that reverses a linked list\nclass Node:",
    "The three laws of thermodynamics state that",
    "import numpy as np\n\ndef softmax(x):",
    "Dear Sir or Madam,\n\nI am writing to",
]


def pytest_generate_tests(metafunc):
    if "directory" in metafunc.fixturenames:
        root = metafunc.config.getoption("--models")
        found = sorted(p.parent for p in Path(root).glob("*/config.json")) if root else []
        metafunc.parametrize("directory", found, ids=[p.name for p in found])


@pytest.fixture(scope="module")
def references():
    """directory -> greedy continuations by transformers, made once."""
    return {}


def reference(references, directory):
    if directory not in references:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        made = []
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
            made.append(out[0, ids.shape[1] :].tolist())
        references[directory] = made
    return references[directory]


@pytest.mark.parametrize("kv", ["contiguous", "paged"])
def test_greedy_tokens_equal_transformers(references, directory, kv):
    expected = reference(references, directory)
    with Engine(
        model=str(directory), kv=kv, device="cpu", max_model_len=256, max_num_seqs=8
    ) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
    assert [o.token_ids for o in outputs] == expected
