"""Draft trees of the CPU stand-in, inside the real SGLang and against its own Triton kernels.

Run as a module this file is the child process of its test: SGLang reads its environment while it
is imported, and the Triton interpreter must be chosen before Triton is.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from fastverify.cpu import sgl_kernel as kernels

TREES = 60
Tree = dict[str, Any]


def build(function: Any, tree: Tree) -> dict[str, torch.Tensor]:
    """Run a tree builder on fresh buffers, prepared as SGLang prepares them."""
    requests, nodes = len(tree["lengths"]), tree["nodes"]
    links = torch.full((3, requests, nodes), -1, dtype=torch.long)
    mask = torch.full((requests * nodes * nodes,), True)
    positions = torch.empty(requests * nodes, dtype=torch.long)
    function(
        tree["parents"],
        tree["selected"],
        tree["lengths"],
        mask,
        positions,
        *links,
        tree["topk"],
        tree["steps"],
        nodes,
        1,
    )
    names = ("index", "child", "sibling")
    return {"mask": mask, "positions": positions, **dict(zip(names, links, strict=True))}


def verify(function: Any, built: dict[str, torch.Tensor], tokens: Tree) -> list[torch.Tensor]:
    """Run a greedy verifier; gives predictions, accepted nodes, accepted counts."""
    requests, nodes = tokens["candidates"].shape
    predicts = torch.zeros(requests * nodes, dtype=torch.int32)
    accepted = torch.full((requests, tokens["steps"] + 1), -1, dtype=torch.int32)
    count = torch.zeros(requests, dtype=torch.int32)
    links = (built["index"], built["child"], built["sibling"])
    function(predicts, accepted, count, tokens["candidates"], *links, tokens["target"])
    return [predicts, accepted, count]


def known_tree() -> Tree:
    """topk 2, two steps: candidates 0, 1 hang on the root, 2-3 on candidate 0, 4-5 on 1."""
    return {
        "parents": torch.tensor([[-1, 0, 1]]),
        "selected": torch.tensor([[0, 1, 3, 4]]),
        "lengths": torch.tensor([7]),
        "topk": 2,
        "steps": 2,
        "nodes": 5,
    }


def test_a_known_tree() -> None:
    built = build(kernels.build_tree_kernel_efficient_cpu, known_tree())
    # Node 3 is candidate 3, below node 1; node 4 is candidate 4, below node 2.
    assert built["mask"].view(5, 5).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]
    assert built["positions"].tolist() == [7, 8, 8, 9, 9]
    assert built["index"].tolist() == [[0, 1, 2, 3, 4]]
    assert built["child"].tolist() == [[1, 3, 4, -1, -1]]
    assert built["sibling"].tolist() == [[-1, 2, -1, -1, -1]]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ([9, 0, 0, 0, 0], [0]),
        ([6, 0, 9, 0, 0], [0, 2]),
        ([5, 7, 0, 3, 0], [0, 1, 3]),
        ([6, 0, 8, 0, 2], [0, 2, 4]),
    ],
)
def test_greedy_verification_of_a_known_tree(target: list[int], path: list[int]) -> None:
    built = build(kernels.build_tree_kernel_efficient_cpu, known_tree())
    tokens = {
        "candidates": torch.tensor([[1, 5, 6, 7, 8]]),
        "target": torch.tensor([target]),
        "steps": 2,
    }
    predicts, accepted, count = verify(kernels.verify_tree_greedy_cpu, built, tokens)
    assert accepted.tolist() == [path + [-1] * (3 - len(path))]
    assert count.tolist() == [len(path) - 1]
    assert predicts[path].tolist() == [target[node] for node in path]


def test_a_single_draft_needs_no_parent_list() -> None:
    tree = {
        "parents": torch.empty(2, 0, dtype=torch.long),
        "selected": torch.zeros(2, 1, dtype=torch.long),
        "lengths": torch.tensor([3, 4]),
        "topk": 1,
        "steps": 1,
        "nodes": 2,
    }
    built = build(kernels.build_tree_kernel_efficient_cpu, tree)
    assert built["positions"].tolist() == [3, 4, 4, 5]
    assert built["child"].tolist() == [[1, -1], [1, -1]]


def test_other_masks_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="build_tree_kernel_efficient_cpu: tree mask"):
        kernels.build_tree_kernel_efficient_cpu(*[torch.empty(0)] * 8, 1, 1, 2, 0)


def random_tree(chance: random.Random, organize: Any) -> Tree:
    """Scores, tokens and parents as the draft worker collects them, chosen by SGLang itself."""
    requests, topk = chance.choice([1, 2, 3]), chance.choice([1, 1, 2, 3])
    steps = chance.choice([2, 3, 4])
    most = topk + (steps - 1) * topk * topk
    nodes = steps + 1 if topk == 1 else chance.randint(3, min(8, most))
    best = torch.rand(requests, topk).sort(-1, descending=True).values
    scores, tokens = [best.unsqueeze(1)], [torch.randint(0, 8, (requests, topk))]
    parents = [torch.arange(-1, topk).repeat(requests, 1)]
    for step in range(1, steps):
        spread = torch.rand(requests, topk, topk).sort(-1, descending=True).values
        expanded = best.unsqueeze(2) * spread
        best, chosen = expanded.flatten(1).topk(topk, -1)
        scores.append(expanded)
        tokens.append(torch.randint(0, 8, (requests, topk * topk)))
        parents.append(chosen + topk + topk * topk * (step - 1))
    parent_list, selected, drafts = organize(scores, tokens, parents, nodes)
    return {
        "parents": parent_list,
        "selected": selected,
        "drafts": drafts,
        "lengths": torch.randint(3, 20, (requests,)),
        "topk": topk,
        "steps": steps,
        "nodes": nodes,
    }


def compare_with_sglang() -> None:
    """Child process: the stand-in as SGLang sees it, and the trees against Triton."""
    import sglang.kernels.ops.speculative.spec_tree as upstream
    from sglang.srt.runtime_context import get_platform
    from sglang.srt.speculative.eagle_utils import organize_draft_results

    from fastverify.hooks import cpu

    assert sys.modules["sgl_kernel"] is kernels
    assert upstream.sgl_verify_tree_greedy_cpu is kernels.verify_tree_greedy_cpu
    cpu.install()
    assert get_platform().has_amx
    torch.manual_seed(0)
    chance, accepted = random.Random(0), 0
    for _ in range(TREES):
        tree = random_tree(chance, organize_draft_results)
        ours = build(kernels.build_tree_kernel_efficient_cpu, tree)
        theirs = build(upstream.sgl_build_tree_kernel_triton, tree)
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), (name, tree)
        first = torch.randint(0, 8, (len(tree["lengths"]), 1))
        candidates = torch.cat([first, tree["drafts"]], 1)
        tokens = {
            "candidates": candidates,
            "target": torch.randint(0, 8, candidates.shape),
            "steps": tree["steps"],
        }
        pairs = zip(
            verify(kernels.verify_tree_greedy_cpu, ours, tokens),
            verify(upstream.verify_tree_greedy_triton, theirs, tokens),
            strict=True,
        )
        results = list(pairs)
        assert all(torch.equal(*pair) for pair in results), (tree, tokens)
        accepted += int(results[2][0].sum())
    print(f"trees {TREES} accepted {accepted}")


def test_trees_equal_those_of_sglang_under_the_triton_interpreter() -> None:
    pytest.importorskip("sglang")
    variables = {
        "TRITON_INTERPRET": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "FASTVERIFY_DISABLE": "1",
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests.test_cpu_tree"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    words = child.stdout.split()
    assert words[-4:-1] == ["trees", str(TREES), "accepted"]
    # Random drafts over 8 tokens: some must have been right, or nothing was compared.
    assert int(words[-1]) > 10


if __name__ == "__main__":
    compare_with_sglang()
