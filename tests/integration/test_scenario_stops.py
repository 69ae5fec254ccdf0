"""Stop strings: across tokens, inside a token, of odd types; nothing of them is shown, nothing before is lost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.answers import WAYS, ask, assert_error, assert_refused, post, scrape, settled
from tests.helpers.checkpoints import START, make_script_llama
from tests.helpers.model_cluster import model_config, served_cluster

LETTERS = [b"A", b"BC", b"DEF", b"G", b"HI"]


@pytest.mark.parametrize(
    ("script", "fields", "text", "end"),
    [
        ([*LETTERS, b"J", b"K"], {"stop": ["DEFGHIJ"]}, "ABC", ("stop", 6)),
        ([*LETTERS, b"J", b"K"], {"stop": ["DEFGHIJ"], "include_stop_str_in_output": True}, "ABCDEFGHIJ", ("stop", 6)),
        ([*LETTERS, b"J", b"K"], {"stop": ["HIJKL", "DEFGHIJ"]}, "ABC", ("stop", 6)),
        ([*LETTERS, b"X"], {"stop": ["DEFGHIJ"]}, "ABCDEFGHIX", ("stop", 7)),  # a near miss
        (LETTERS, {"stop": ["DEFGHIJ"]}, "ABCDEFGHI", ("stop", 6)),  # held back when the end token comes
        ([*LETTERS, b"J"], {"stop": ["DEFGHIJ"], "max_tokens": 5}, "ABCDEFGHI", ("length", 5)),
        ([b"please", b"stop!", b"more"], {"stop": ["stop"]}, "please", ("stop", 2)),
        (
            [b"please", b"stop!", b"more"],
            {"stop": ["stop"], "include_stop_str_in_output": True},
            "pleasestop",
            ("stop", 2),
        ),
        ([b"xa", b"bc", b"d"], {"stop": ["ab", "abc"]}, "x", ("stop", 2)),  # one contains the other
        ([b"xa", b"bc", b"d"], {"stop": ["abc", "ab"], "include_stop_str_in_output": True}, "xab", ("stop", 2)),
        ([b"xaabcc", b"d"], {"stop": ["ab", "abc"]}, "xa", ("stop", 1)),  # both in one token
        ([b"xabc", b"d"], {"stop": ["bc", "abc"]}, "x", ("stop", 1)),  # both end there: the longer one
    ],
)
async def test_stop_strings(
    script: Sequence[bytes], fields: dict[str, Any], text: str, end: tuple[str, int], tmp_path: Path
) -> None:
    """`end`: the finish reason, and how many tokens were generated."""
    finish, tokens = end
    made = make_script_llama(tmp_path, script)
    async with served_cluster(model_config(tmp_path)) as served:
        for way in WAYS:
            answer = await ask(served, way, [START], **{"max_tokens": 20, "temperature": 0} | fields)
            assert (answer.text, answer.finish, answer.completion_tokens) == (text, finish, tokens)
            if way == "grpc":
                assert answer.token_ids == [*made.token_ids, *made.ending_ids][:tokens]
        generated = (await scrape(served))("pdserve_generated_tokens_total")
        assert generated == len(WAYS) * tokens  # each once; none behind the stop
        probe = await ask(served, "whole", [START], max_tokens=20, temperature=0)
        assert probe.text == b"".join(script).decode()
        await settled(served)


VALUES: list[tuple[Any, str]] = [
    (None, "abc"),
    ([], "abc"),
    ("b", "a"),
    (["b"], "a"),
    (["v", "w", "x", "y", "b"], "a"),
    ([*("stuvwxyz" * 2)[:15], "b"], "a"),
    ("x" * 1000, "abc"),
    ("c" + "x" * 1000, "abc"),
]


async def test_odd_values(tmp_path: Path) -> None:
    make_script_llama(tmp_path, [b"a", b"b", b"c"])
    async with served_cluster(model_config(tmp_path)) as served:
        for way in WAYS:
            for stop, text in VALUES:
                fields = {} if way == "grpc" and stop is None else {"stop": stop}
                assert (await ask(served, way, [START], max_tokens=9, temperature=0, **fields)).text == text
            assert (await ask(served, way, [START], max_tokens=9, temperature=0)).text == "abc"
        for stop in ("", [""], ["a", ""], ["a"] * 17, "x" * 10_000):
            await assert_refused(served, [START], code="invalid_request", param="stop", max_tokens=9, stop=stop)
        for stop in ([1], 5, {"a": 1}, [["a"]], [None], True):
            for chat in (False, True):
                for stream in (False, True):
                    response = await post(served, "hi" if chat else [START], chat=chat, stop=stop, stream=stream)
                    assert_error(response, code="invalid_request", param="stop")
        assert (await ask(served, "whole", [START], max_tokens=9, temperature=0)).text == "abc"
        await settled(served)
