"""Draft trees: building the verify input and accepting greedily."""

from __future__ import annotations

import torch

QLEN_ONLY = 1


def _parents(
    parent_list: torch.Tensor, selected: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parent node of nodes 1..n-1, and whether that parent is in the tree; node 0 is the root.

    A candidate's number divided by topk names the group it was expanded from; group 0 hangs on
    the root and `parent_list` maps every other group to the candidate that was expanded.
    """
    group = selected // topk
    # Drafts of one step have no parent list; the extra column keeps the lookup in range.
    padded = torch.cat([parent_list, parent_list.new_full((len(selected), 1), -1)], dim=1)
    wanted = padded.gather(1, group.clamp(max=padded.shape[1] - 1))
    same = selected.unsqueeze(1) == wanted.unsqueeze(2)
    on_root = group == 0
    found = same.any(2)
    parent = torch.where(on_root | ~found, 0, same.int().argmax(2) + 1)
    return parent, on_root | found


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill mask, positions and child/sibling links of each request's draft tree, in place.

    `selected_index` [requests, n - 1] holds the chosen candidates in ascending order, so a parent
    always comes before its children. The links must arrive as -1. Only the QLEN_ONLY mask
    ([requests, n, n], draft tokens among themselves) exists on a CPU.
    """
    if int(tree_mask_mode) != QLEN_ONLY:
        raise NotImplementedError(
            f"build_tree_kernel_efficient_cpu: tree mask mode {int(tree_mask_mode)} is not covered"
            f" on a CPU, only QLEN_ONLY ({QLEN_ONLY})"
        )
    requests, nodes = len(verified_seq_len), draft_token_num
    parent, linked = _parents(parent_list.long(), selected_index.long(), topk)
    every = torch.arange(requests)
    mask = torch.zeros(requests, nodes, nodes, dtype=torch.bool)
    mask[:, 0, 0] = True
    level = torch.zeros(requests, nodes, dtype=torch.long)
    for node in range(1, nodes):
        up = parent[:, node - 1]
        mask[:, node] = mask[every, up]
        mask[:, node, node] = True
        level[:, node] = level[every, up] + 1
    tree_mask.view(-1)[: mask.numel()] = mask.flatten().to(tree_mask.dtype)
    positions.view(-1)[:] = (verified_seq_len.long().unsqueeze(1) + level).flatten()
    retrive_index.copy_(torch.arange(requests * nodes).view(requests, nodes))
    # Backwards, so that a node's first child is its best one.
    for node in range(nodes - 1, 0, -1):
        rows = linked[:, node - 1].nonzero().squeeze(1)
        up = parent[rows, node - 1]
        retrive_next_sibling[rows, node] = retrive_next_token[rows, up]
        retrive_next_token[rows, up] = node


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree along the target's greedy choices, in place.

    `accept_index` [requests, steps + 1] gets the flat numbers of the accepted nodes, the root
    first, and keeps its filler after them; `accept_token_num` counts accepted drafts without the
    root; `predicts` gets the target's token at every accepted node.
    """
    chosen = target_predict.flatten().tolist()
    for request, tokens in enumerate(candidates.tolist()):
        flat = retrive_index[request].tolist()
        child = retrive_next_token[request].tolist()
        sibling = retrive_next_sibling[request].tolist()
        path = [0]
        while len(path) < accept_index.shape[1]:
            node = child[path[-1]]
            while node >= 0 and tokens[node] != chosen[flat[path[-1]]]:
                node = sibling[node]
            if node < 0:
                break
            path.append(node)
        accepted = torch.tensor([flat[node] for node in path])
        accept_index[request, : len(path)] = accepted.to(accept_index.dtype)
        accept_token_num[request] = len(path) - 1
        predicts[accepted] = target_predict.flatten()[accepted].to(predicts.dtype)
