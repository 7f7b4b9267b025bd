"""Signs that a drafter was made for another model warn and never refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastverify.model.config import model_config
from fastverify.model.drafter import check_drafter
from fastverify.model.kinship import version_clash
from tests.checkpoints import (
    GOAL,
    TARGET,
    draft_config,
    draft_tensors,
    write_model,
)

BOTH = pytest.mark.parametrize("kind", ["mha", "mla"])


@pytest.mark.parametrize(
    ("target", "draft", "clash"),
    [
        ("MiniMax-M2.7-NVFP4", "MiniMax-M2.5-Eagle3", ("M2.7", "M2.5")),
        ("moonshotai/Kimi-K2.6", "lightseekorg/kimi-k2.5-eagle3-mla", ("K2.6", "K2.5")),
        ("moonshotai/Kimi-K2.5", "AQ-MedAI/Kimi-K2-Instruct-eagle3", ("K2.5", "K2")),
        ("moonshotai/Kimi-K2.5", "AQ-MedAI/Kimi-K25-eagle3", None),
        ("moonshotai/Kimi-K2.6", "lightseekorg/kimi-k2.6-eagle3.1-mla", None),
        ("zai-org/GLM-5.1-FP8", "someone/GLM-5-eagle3", ("GLM5.1", "GLM5")),
        ("deepseek-ai/DeepSeek-V3", "lmsys/DeepSeek-V3-EAGLE3-bf16", None),
        ("models/target", "models/draft", None),
        ("Qwen3-8B", "Qwen3-8B_eagle3/config.json", None),
    ],
)
def test_versions_in_names(target: str, draft: str, clash: tuple[str, str] | None) -> None:
    assert version_clash(target, draft) == clash


def test_a_base_model_in_the_config_counts_as_a_name(tmp_path: Path) -> None:
    name = write_model(
        tmp_path / "d", draft_config("mha", base_model="moonshotai/Kimi-K2"), draft_tensors("mha")
    )
    for goal_name, expected in (("moonshotai/Kimi-K2.5", 1), ("moonshotai/Kimi-K2", 0)):
        facts = check_drafter(model_config(TARGET, goal_name), name)
        assert facts is not None and len(facts.warnings) == expected


def test_another_tokenizer_is_a_warning(tmp_path: Path) -> None:
    name = write_model(tmp_path / "d", draft_config("mha"), draft_tensors("mha"))
    other = tmp_path / "t"
    other.mkdir()

    def write(folder: Path, vocab: dict[str, int], indent: int) -> None:
        text = json.dumps({"model": {"vocab": vocab}}, indent=indent)
        (folder / "tokenizer.json").write_text(text)

    def warnings() -> tuple[str, ...]:
        facts = check_drafter(GOAL, name, target_folder=other)
        assert facts is not None
        return facts.warnings

    write(other, {"a": 0, "b": 1}, 0)
    assert warnings() == (), "no tokenizer beside the drafter"
    write(tmp_path / "d", {"a": 0, "b": 1}, 4)
    assert warnings() == (), "another layout of the same tokens"
    write(tmp_path / "d", {"a": 0, "b": 1, "c": 2}, 0)
    assert "3 tokens" in warnings()[0] and "2" in warnings()[0]
    (tmp_path / "d" / "tokenizer.json").write_text("{")
    assert len(warnings()) == 1
