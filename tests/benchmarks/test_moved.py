"""benchmarks.moved on the CPU: the second server fetches what the first one has computed."""

import json

import pytest

from benchmarks import moved
from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT

pytestmark = pytest.mark.slow


def test_a_conversation_is_fetched_by_the_second_server(tmp_path, capsys):
    build_engine(DEMO_CHECKPOINT, tmp_path / "engine", "reference", dtype="float32")
    words = ["--engine", str(tmp_path / "engine"), "--store", str(tmp_path)]
    assert moved.main([*words, "--tokens", "600", "--repetitions", "4"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(told["conversations"]) == 4
    for line in told["conversations"]:
        # 608: the reply fills a chunk; a store that a busy machine delays is not waited for
        assert line["fetched_tokens"] in (0, 608)
        assert line["to_kept"] == 0 and line["to_computed"] < 1e-3
    assert not [path for path in tmp_path.iterdir() if path.name != "engine"]
