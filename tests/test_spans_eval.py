"""evals/speed/spans.py: the arms, the table, and a short run on this machine."""

from __future__ import annotations

import json

from evals.speed.spans import AGAIN, PLAIN, arms, main, table
from plugins.fusion.onednn import OneDnnFusion


def test_an_arm_is_one_span_or_none_or_all():
    found = arms(["inductor", "onednn"])
    assert found[PLAIN] == found[AGAIN] == ("none", {})
    assert found["inductor: add_norm"] == ("inductor", {"fusion.only": ["add_norm"]})
    assert found["inductor: all"] == ("inductor", {})
    assert found["onednn: down"] == ("onednn", {"fusion.only": ["down"]})
    assert sum(name.startswith("inductor") for name in found) == 5
    assert sum(name.startswith("onednn") for name in found) == 6


def test_ratios_are_of_medians_to_the_plain_nodes():
    found = {"decode 1": {PLAIN: [2.0, 4.0, 3.0], AGAIN: [3.0], "x: all": [1.0, 1.5, 9.0]}}
    rows = table(found)
    assert [row["spans"] for row in rows] == [PLAIN, AGAIN, "x: all"]
    assert [row["decode 1"] for row in rows] == ["3.00 (1.00x)", "3.00 (1.00x)", "1.50 (0.50x)"]


def test_a_run_measures_every_arm_in_every_round(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(OneDnnFusion.Config, "names", ("down",))
    argv = "--model random:tiny --device cpu --fusion onednn --prefill 16 --batch 1 2 --steps 4"
    argv += f" --context 32 --repeats 2 --rounds 2 --kv-cache-bytes 16MiB --json {tmp_path}/x.json"
    assert main(argv.split()) == 0
    assert "onednn: all" in capsys.readouterr().out
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["median_ms"].keys() == {"prefill 16", "decode 1", "decode 2"}
    for by_arm in result["median_ms"].values():
        assert by_arm.keys() == {PLAIN, AGAIN, "onednn: down", "onednn: all"}
        assert all(len(times) == 2 and min(times) > 0 for times in by_arm.values())


def test_a_set_that_does_not_run_here_is_a_sentence(capsys):
    assert main(["--model", "random:tiny", "--device", "cpu", "--fusion", "tritn"]) == 2
    assert "there is no fusion called 'tritn'" in capsys.readouterr().err
