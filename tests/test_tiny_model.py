"""The tiny model: how it is made and kept, its tokenizer, and what its drafters compute."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import shutil
import time
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastverify.errors import ConfigError
from fastverify.tiny import build
from fastverify.tiny.config import CONFIG, HIDDEN, LAYERS, VOCAB
from fastverify.tiny.tokenizer import CHAT_TEMPLATE, SPECIAL, WORDS, vocabulary


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of one freshly made model."""
    return build.build_tiny(tmp_path_factory.mktemp("cache")).target.parent


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def small_models(folder: pathlib.Path) -> None:
    """Stands in for the real recipe where only the keeping is tested."""
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text("{}")


# Keeping


def test_two_builds_are_equal_byte_for_byte(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    again = build.build_tiny(tmp_path).target.parent
    assert again.name == made.name == build.recipe_key()
    assert contents(again) == contents(made)


def test_the_whole_model_is_small(made: pathlib.Path) -> None:
    assert sum(len(data) for data in contents(made).values()) < 150e6


def test_a_second_call_makes_nothing(made: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_make", lambda folder: pytest.fail("made again"))
    cache = made.parent.parent
    assert build.build_tiny(cache) == (made / "target", made / "draft-llama")
    assert build.build_tiny(cache, "mla").draft == made / "draft-mla"


def test_paths_are_known_before_anything_is_made(tmp_path: pathlib.Path) -> None:
    paths = build.tiny_paths(tmp_path)
    assert paths.target.parent == tmp_path / "tiny" / build.recipe_key()
    assert list(tmp_path.iterdir()) == []


def test_the_cache_variable_names_the_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTVERIFY_CACHE", str(tmp_path))
    assert build.tiny_paths().target.is_relative_to(tmp_path)


def test_a_changed_recipe_has_another_key(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pathlib.Path(build.__file__).parent
    for name in build._RECIPE:
        shutil.copy(folder / name, tmp_path)
    before = build.recipe_key()
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    assert build.recipe_key() == before
    with (tmp_path / "target.py").open("a") as source:
        source.write("\n")
    assert build.recipe_key() != before


def test_the_recipe_is_every_module_but_the_package() -> None:
    folder = pathlib.Path(build.__file__).parent
    assert {path.name for path in folder.glob("*.py")} == {*build._RECIPE, "__init__.py"}


def test_concurrent_callers_make_it_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def slow(folder: pathlib.Path) -> None:
        calls.append(folder)
        time.sleep(0.3)
        assert not build.tiny_paths(tmp_path).target.exists()
        small_models(folder)

    monkeypatch.setattr(build, "_write_models", slow)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(build.build_tiny, tmp_path) for _ in range(4)]
        paths = {future.result(timeout=30) for future in futures}
    assert len(calls) == 1
    assert paths == {build.tiny_paths(tmp_path)}


def test_a_failed_build_leaves_nothing_and_says_what_to_do(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: pathlib.Path) -> None:
        small_models(folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "_write_models", full)
    with pytest.raises(ConfigError, match="No space left on device.*FASTVERIFY_CACHE") as caught:
        build.build_tiny(tmp_path)
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in (tmp_path / "tiny").iterdir()] == [".lock"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest"])
def test_a_damaged_model_is_made_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(build, "_write_models", small_models)
    config = build.build_tiny(tmp_path).target / "config.json"
    if damage == "missing":
        config.unlink()
    else:
        broken = config if damage == "truncated" else config.parent.parent / "manifest.json"
        broken.write_text("{")
    build.build_tiny(tmp_path)
    assert config.read_text() == "{}"


def test_a_file_in_place_of_the_cache_is_refused(tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*name another one") as caught:
        build.build_tiny(blocked)
    assert str(blocked) in str(caught.value)


def test_the_wait_for_another_builder_ends(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    lock = tmp_path / "tiny" / f"{build.recipe_key()}.lock"
    with build._locked(lock, 1), pytest.raises(ConfigError, match="another process"):
        build.build_tiny(tmp_path, lock_timeout_s=0.2)
    monkeypatch.setattr(build, "_write_models", small_models)
    build.build_tiny(tmp_path, lock_timeout_s=0.2)


# Tokenizer


@pytest.fixture(scope="module")
def tokenizer(made: pathlib.Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(made / "target")


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    for text in (
        "Where is the water?",
        "naïve \n\t日本 🙂",
        "  two  spaces",
        "".join(map(chr, range(256))),
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_spaced_word_is_one_token(tokenizer: Any) -> None:
    ids = [tokenizer(f" {word}")["input_ids"] for word in WORDS]
    assert sorted(ids) == [[number] for number in sorted(vocabulary()[1])]


def test_special_tokens_and_the_chat_template(tokenizer: Any) -> None:
    assert len(tokenizer) <= VOCAB
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go <on>"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be brief.<|end|><|user|>Go <on><|end|><|assistant|>"
    assert set(SPECIAL) - {"<|end|>"} <= set(
        tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
    )


# Weights


@pytest.fixture(scope="module")
def target(made: pathlib.Path) -> dict[str, torch.Tensor]:
    return load_file(made / "target" / "model.safetensors")


def drafter(made: pathlib.Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    folder = made / name
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_head_sizes_are_those_that_gpu_kernels_are_built_for() -> None:
    sizes = [CONFIG[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")]
    assert sizes == [512, 64, 128]
    assert CONFIG["num_attention_heads"] % 16 == 0
    assert CONFIG["moe_intermediate_size"] % (8 * 16) == 0
    assert len({2, LAYERS // 2, LAYERS - 3}) == 3


def test_only_words_can_be_answers(target: dict[str, torch.Tensor]) -> None:
    """The constant channel is written by no layer, and the head turns it against the rest."""
    writers = [
        w for name, w in target.items() if name.endswith(("o_proj.weight", "down_proj.weight"))
    ]
    assert writers and all((weight[0] == 0).all() for weight in writers)
    assert (target["model.embed_tokens.weight"][:, 0] == 3).all()
    column = target["lm_head.weight"][:, 0]
    assert set((column == 0).nonzero().flatten().tolist()) == vocabulary()[1]


def test_the_reduced_vocabulary_and_its_maps_fit(
    made: pathlib.Path, target: dict[str, torch.Tensor]
) -> None:
    config, tensors = drafter(made, "draft-llama")
    ids = tensors["d2t"] + torch.arange(config["draft_vocab_size"])
    assert ids.unique().tolist() == ids.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert vocabulary()[1] <= set(ids.tolist())
    assert torch.equal(tensors["lm_head.weight"], target["lm_head.weight"][ids])


def test_the_whole_vocabulary_needs_no_maps(made: pathlib.Path) -> None:
    config, tensors = drafter(made, "draft-mla")
    assert config["draft_vocab_size"] == VOCAB == len(tensors["lm_head.weight"])
    assert not {"d2t", "t2d"} & set(tensors)


def attention_of(config: dict[str, Any], kind: str) -> tuple[torch.nn.Module, Any, tuple[str, ...]]:
    """transformers' own attention and rotary modules, widened to [embedding, hidden] inputs."""
    import transformers.models.deepseek_v3.modeling_deepseek_v3 as deepseek
    import transformers.models.llama.modeling_llama as llama
    from transformers import DeepseekV3Config, LlamaConfig

    shape = {key: value for key, value in config.items() if key != "model_type"}
    if kind == "llama":
        made = LlamaConfig(**shape, attn_implementation="eager")
        module: torch.nn.Module = llama.LlamaAttention(made, 0)
        rotary, wide = llama.LlamaRotaryEmbedding(made), ("q_proj", "k_proj", "v_proj")
    else:
        made = DeepseekV3Config(**shape, attn_implementation="eager")
        module = deepseek.DeepseekV3Attention(made, 0)
        rotary, wide = deepseek.DeepseekV3RotaryEmbedding(made), ("q_a_proj", "kv_a_proj_with_mqa")
    for name in wide:
        old = getattr(module, name)
        setattr(module, name, torch.nn.Linear(2 * HIDDEN, old.out_features, bias=False))
    return module.eval(), rotary, wide


@pytest.mark.parametrize("kind", ["llama", "mla"])
@torch.no_grad()
def test_a_drafter_moves_the_context_to_the_next_token(
    made: pathlib.Path, target: dict[str, torch.Tensor], kind: str
) -> None:
    """Its state at p is the target's at p, less embedding(p), plus embedding(p + 1)."""
    config, tensors = drafter(made, f"draft-{kind}")
    module, rotary, _ = attention_of(config, kind)
    prefix = "midlayer.self_attn."
    weights = {n[len(prefix) :]: w.float() for n, w in tensors.items() if n.startswith(prefix)}
    module.load_state_dict(weights)
    torch.manual_seed(5)
    rows = 60
    tokens = torch.randint(0, VOCAB, (rows + 1,))
    embedding = target["model.embed_tokens.weight"].float()[tokens]
    context = torch.randn(rows, HIDDEN)
    aux = torch.cat([torch.randn(rows, 2 * HIDDEN), embedding[:-1] + context], 1)
    hidden = aux @ tensors["fc.weight"].float().T
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
    inputs = torch.cat([embedding[1:], normed], 1).unsqueeze(0)
    places = rotary(inputs, torch.arange(rows).unsqueeze(0) + 1000)
    causal = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
    mixed = module(inputs, position_embeddings=places, attention_mask=causal)[0][0]
    moved = hidden + mixed
    # Nothing comes before the first row, so only the others are exact.
    torch.testing.assert_close(moved[1:], context[1:] + embedding[2:], rtol=0.02, atol=0.05)
