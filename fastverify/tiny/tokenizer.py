"""A byte-level BPE tokenizer written down rather than trained: 256 bytes and a few common words."""

from __future__ import annotations

from typing import Any

# The model answers with these, each with a space before it; ASCII, so that any answer is text.
_WORD_LIST = """
    about above across add after again air all almost along also always am among an and animal
    another answer any are around as ask at away back bank base be because bed been before began
    begin below best better between big bird black blue boat body book both box boy bring brown
    build but by call came can car care carry cat change city clear close cold come could country
    cut dark day deep did do dog done door down draw dry each early earth ease east eat end enough
    even ever every eye face fact fall far farm fast father few field find fire first fish five
    fly follow food foot for form found four free friend from full game gave get girl give go gold
    good got great green ground group grow had half hand hard has have he head hear heat help her
    here high him his hold home horse hot hour house how if in into is it just keep kind king know
    land large last late lead leaf learn leave left letter life light like line list little live
    long look made make man many map mark may me mean men might mile milk mind more most mother
    mountain move much music must my name near need never new next night no north not note now
    number of off often old on once one only open or order other our out over own page paper part
    people picture place plain plan plant play point press problem put question quick rain ran
    read ready real red rest right river road rock room round rule run said same saw say school
    sea second see seem self sentence serve set ship short should show side simple since sing sit
    sky sleep slow small snow so some song soon sound south spell stand star start state still
    stop story street strong study such sun sure table tail take talk tell ten than that the their
    them then there these they thing think this those thought three through time to together told
    too took top town travel tree true turn two under unit until up upon us use very voice wait
    walk want warm was watch water way we week well went were west what wheel when where which
    while white who whole why will wind with without wood word work world would write year yes
    you young your
"""
WORDS = tuple(_WORD_LIST.split())

SPECIAL = ("<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS, END = 0, 1

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte, as byte-level BPE spells bytes (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _pieces_and_merges() -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces and merges that build every spaced word from left to right."""
    pieces = _byte_characters()
    space = pieces[0x20]
    known, merges = set(pieces), []
    for word in WORDS:
        built = space
        for letter in word:
            if built + letter not in known:
                known.add(built + letter)
                pieces.append(built + letter)
                merges.append((built, letter))
            built += letter
    return pieces, merges


def vocabulary() -> tuple[list[str], frozenset[int]]:
    """All tokens by id, and the ids of the spaced words."""
    pieces, _ = _pieces_and_merges()
    tokens = [*SPECIAL, *pieces]
    number = {token: index for index, token in enumerate(tokens)}
    space = _byte_characters()[0x20]
    return tokens, frozenset(number[space + word] for word in WORDS)


def tokenizer_files() -> dict[str, dict[str, Any]]:
    """Contents of tokenizer.json and tokenizer_config.json, by file name."""
    tokens, _ = vocabulary()
    _, merges = _pieces_and_merges()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    added = [
        {"id": index, "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, token in enumerate(SPECIAL)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[END],
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
