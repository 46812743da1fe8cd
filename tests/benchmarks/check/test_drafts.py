"""The script that counts what prompt lookup gives."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.check.drafts import main


def test_a_repeated_text_has_several_tokens_a_step(tmp_path, capsys):
    words = Tokenizer(
        models.WordLevel({str(number): number for number in range(100)}, unk_token="0")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    repeated = " ".join(map(str, range(1, 61)))
    for name, reply in (("copied", repeated), ("new", " ".join(map(str, range(60, 0, -1))))):
        messages = [{"role": "user", "content": repeated}, {"role": "assistant", "content": reply}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert (
        main(
            [str(tmp_path / f"{name}") for name in ("tokenizer.json", "copied.jsonl", "new.jsonl")]
        )
        == 0
    )
    copied, new = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    assert float(copied[4].strip(" |")) > 4
    assert new[2:] == ["0", "0.00 of 0.00", "1.00 |"]


def test_a_line_without_messages_is_named(tmp_path, capsys):
    Tokenizer(models.WordLevel({"0": 0}, unk_token="0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "wrong.jsonl").write_text("{}\n")
    assert main([str(tmp_path / "tokenizer.json"), str(tmp_path / "wrong.jsonl")]) == 2
    assert "line 1: needs an object with messages" in capsys.readouterr().err
