"""`outweigh` as a model of lm-evaluation-harness: the same answers and scores as its own `hf`.

Skipped without the harness, but for what is said then. Both read the embedded model in float32.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import evals.tiny
from core import Engine
from core.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(
    not HAS_HARNESS, reason="lm-eval: needs the extra lm-eval (lm_eval, accelerate)"
)
BLOCKED = """
import sys
sys.modules["lm_eval"] = None
from core.errors import UserError
try:
    import evals.quality.lm_eval_model
except UserError as error:
    print(error)
"""

# A multiple choice, scored by the likelihood of each choice, and a text that is written out.
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{sentence}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
PAIRS = """
task: tiny_pairs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
SENTENCES = [
    ("The ship sailed across the", ["sea", "of", "because"]),
    ("He opened the door and went into the", ["room", "was", "quickly"]),
    ("She put her hand upon his", ["shoulder", "the", "and"]),
    ("Once upon a", ["time", "very", "whom"]),
    ("They sat down at the", ["table", "had", "never"]),
    ("It was a dark and stormy", ["night", "which", ","]),
    ("In the middle of the", ["night", "said", "them"]),
    ("He shook his", ["head", "are", "upon"]),
]


def test_without_the_harness_it_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "lm-evaluation-harness is not here" in done.stdout, done.stderr
    assert "pip install 'outweigh[lm-eval]'" in done.stdout and done.stdout.count("\n") == 1


@pytest.fixture(scope="module")
def ours():
    if not HAS_HARNESS:
        pytest.skip("lm-eval: needs the extra lm-eval (lm_eval, accelerate)")
    from evals.quality.lm_eval_model import OutweighLM

    lm = OutweighLM(model="tiny", kv="paged", device="cpu", dtype="float32", max_model_len=512)
    yield lm
    lm.engine.close()


@pytest.fixture(scope="module")
def theirs():
    from lm_eval.models.huggingface import HFLM

    options = {"device": "cpu", "dtype": "float32", "batch_size": 1, "max_length": 512}
    return HFLM(pretrained=str(evals.tiny.MODEL), **options)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Two tasks as the harness reads them, from rows on disk."""
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    choices = [
        {"sentence": text, "choices": shown, "label": 0} for text, shown in SENTENCES
    ]  # fmt: skip
    pairs = []
    for i in range(8):
        values = [f"{(7919 * (i * 12 + j + 3)) % 90000 + 10000}" for j in range(12)]
        names = "apple bridge candle desert engine forest garden hammer island jacket kettle lemon"
        lines = [f"{name}: {value}" for name, value in zip(names.split(), values, strict=True)]
        head = "Remember these pairs:\n" + "\n".join(lines)
        question = f"\nQuestion: What is the value of {names.split()[i]}?\nAnswer:"
        pairs.append({"prompt": head + question, "answer": f" {values[i]}"})
    for name, rows, form in (("choice", choices, CHOICE), ("pairs", pairs, PAIRS)):
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        (folder / f"{name}.yaml").write_text(form.format(file=file))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(lm, tasks):
    import lm_eval

    names = ["tiny_choice", "tiny_pairs"]
    return lm_eval.simple_evaluate(
        model=lm, tasks=names, task_manager=tasks, log_samples=True, bootstrap_iters=0
    )


@needs_harness
def test_two_tasks_score_the_same_as_through_transformers(ours, theirs, tasks):
    got, wanted = evaluated(ours, tasks), evaluated(theirs, tasks)
    scores = [
        {
            task: {name: value for name, value in row.items() if "stderr" not in name}
            for task, row in one["results"].items()
        }
        for one in (got, wanted)
    ]
    assert scores[0] == scores[1]
    assert scores[0]["tiny_choice"]["acc,none"] > 0.5  # and they measure something
    assert scores[0]["tiny_pairs"]["exact_match,none"] > 0.5
    for task in ("tiny_choice", "tiny_pairs"):
        pairs = zip(got["samples"][task], wanted["samples"][task], strict=True)
        for one, other in pairs:
            assert one["doc_id"] == other["doc_id"]
            for a, b in zip(one["resps"], other["resps"], strict=True):
                if task == "tiny_pairs":
                    assert a == b  # greedy text, character by character
                else:
                    assert float(a[0][0]) == pytest.approx(float(b[0][0]), abs=1e-3)
                    assert str(a[0][1]) == str(b[0][1])


def request(*args):
    return SimpleNamespace(args=args)


@needs_harness
@pytest.mark.parametrize("length", [40, 700, 1300])
def test_rolling_likelihood_is_that_of_transformers(ours, theirs, length):
    """One window, two, and three."""
    text = ("The old man looked at the sea, and said nothing for a while. " * 400)[: length * 4]
    asked = [request(text)]
    (got,), (wanted,) = ours.loglikelihood_rolling(asked), theirs.loglikelihood_rolling(asked)
    assert got == pytest.approx(wanted, rel=1e-5)


@needs_harness
def test_what_is_too_long_loses_its_beginning_as_there(ours, theirs):
    context = "a sentence of some words, " * 200
    for target in (" the", " and so on"):
        new = []
        for lm in (ours, theirs):
            ids = lm.tok_encode(context), lm.tok_encode(target)
            new.append(lm._loglikelihood_tokens([(("", ""), *ids)])[0])
        assert new[0][0] == pytest.approx(new[1][0], abs=1e-3) and new[0][1] == new[1][1]
    asked = [request(context, {"max_gen_toks": 8, "until": ["."]})]
    assert ours.generate_until(asked) == theirs.generate_until(asked)


@needs_harness
def test_greedy_is_said_where_the_target_is_what_is_written(ours):
    (text,) = ours.generate_until([request("The old man", {"max_gen_toks": 4, "until": []})])
    right, wrong = ours.loglikelihood([request("The old man", text), request("The old man", " q")])
    assert right[1] and not wrong[1]


@needs_harness
def test_what_a_task_wants_of_sampling(ours):
    read = ours._params
    assert read({"until": "x"}).stop == ("x",) and read({}).max_tokens == 256
    assert read({"do_sample": False, "temperature": 0.7}).temperature == 0
    hot = read({"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 3, "until": ["a", ""]})
    assert (hot.temperature, hot.top_p, hot.max_tokens, hot.stop) == (0.7, 0.9, 3, ("a",))
    with pytest.raises(UserError, match="wants num_beams of generation"):
        read({"num_beams": 2})
    with pytest.raises(UserError, match="512 new tokens are wanted of max_model_len 512"):
        ours.generate_until([request("a", {"max_gen_toks": 512})])


@needs_harness
def test_it_is_made_of_the_arguments_of_the_command():
    from lm_eval.api.registry import get_model

    made = get_model("outweigh").create_from_arg_string(
        "model=random:tiny,kv=paged_int8,kv.block_size=8,max_model_len=64",
        {"batch_size": 1, "max_batch_size": None, "device": "cpu"},
    )
    with made.engine as engine:
        assert engine.plan.kv.name == "paged_int8" and engine._kv.block_size == 8
        assert made.max_length == 64
        with pytest.raises(UserError, match="names no end of text"):
            _ = made.eot_token_id
        with pytest.raises(UserError, match="no template for chats"):
            made.apply_chat_template([{"role": "user", "content": "a"}])
    with Engine(model="random:tiny", device="cpu", max_model_len=64) as engine:
        assert get_model("outweigh")(engine=engine).engine is engine
