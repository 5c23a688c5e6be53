import asyncio

import pytest

from understudy.core.request import FinishReason, Output
from understudy.errors import EngineLost, SlowReader
from understudy.server.mailbox import MOST_WAITING_TOKENS, Mailbox


def output(choice: int, *tokens: int, finish: FinishReason | None = None) -> Output:
    return Output("a", choice, tokens, "".join(map(chr, tokens)), finish_reason=finish, sources=("",) * len(tokens))


def no_overflow() -> None:
    raise AssertionError


def test_outputs_are_taken_in_order_and_joined_while_they_wait() -> None:
    async def read() -> None:
        mailbox = Mailbox(2, no_overflow)
        mailbox.put(output(0, 65))
        mailbox.put(output(1, 66))
        mailbox.put(output(0, 67, finish="stop"))
        assert await mailbox.take() == output(0, 65, 67, finish="stop")
        assert not mailbox.is_finished
        mailbox.put(output(1, finish="length"))
        assert await mailbox.take() == output(1, 66, finish="length")
        assert mailbox.is_finished

    asyncio.run(read())


def test_a_reader_waits_and_is_woken() -> None:
    async def read() -> None:
        mailbox = Mailbox(1, no_overflow)
        reader = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(output(0, 65))
        assert await reader == output(0, 65)

    asyncio.run(read())


def test_what_was_said_comes_before_the_error() -> None:
    async def read() -> None:
        mailbox = Mailbox(1, no_overflow)
        mailbox.put(output(0, 65))
        mailbox.fail(EngineLost("gone"))
        assert await mailbox.take() == output(0, 65)
        with pytest.raises(EngineLost):
            await mailbox.take()

    asyncio.run(read())


def test_a_reader_that_falls_too_far_behind_is_given_up() -> None:
    async def read() -> None:
        overflows: list[bool] = []
        mailbox = Mailbox(1, lambda: overflows.append(True))
        for _ in range(MOST_WAITING_TOKENS):
            mailbox.put(output(0, 65))
        assert not overflows
        mailbox.put(output(0, 66))
        mailbox.put(output(0, 67))
        assert overflows == [True], "the engine is told once"
        await mailbox.take()
        with pytest.raises(SlowReader):
            await mailbox.take()

    asyncio.run(read())


def test_after_an_error_the_engine_has_nothing_more_to_say() -> None:
    async def read() -> None:
        mailbox = Mailbox(1, lambda: None)
        assert mailbox.is_expecting
        mailbox.put(output(0, *range(MOST_WAITING_TOKENS + 1)))
        assert not mailbox.is_expecting, "it was given up"
        mailbox.put(output(0, finish="abort"))  # what the engine says of a request that it was told to drop
        assert (await mailbox.take()).finish_reason is None
        with pytest.raises(SlowReader):
            await mailbox.take()

    asyncio.run(read())


def test_an_answer_that_is_whole_is_not_expected_any_more() -> None:
    mailbox = Mailbox(2, no_overflow)
    mailbox.put(output(0, 65, finish="stop"))
    assert mailbox.is_expecting
    mailbox.put(output(1, 66, finish="stop"))
    assert not mailbox.is_expecting
    assert not mailbox.is_finished, "nobody has read it"


def test_a_taker_has_what_comes_while_the_reader_waits_but_never_the_end() -> None:
    async def read() -> None:
        mailbox, taken = Mailbox(1, no_overflow), list[Output]()

        def take(offered: Output) -> bool:
            taken.append(offered)
            return offered.token_ids != (67,)

        mailbox.taker = take
        mailbox.put(output(0, 65))  # nobody waits: what comes later must not overtake it
        assert await mailbox.take() == output(0, 65)
        assert not taken
        reader = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(output(0, 66))
        mailbox.put(output(0, 67))  # refused, so the reader is woken
        mailbox.put(output(0, 68))  # and has not gone on yet
        assert await reader == output(0, 67, 68)
        assert taken == [output(0, 66), output(0, 67)]
        reader = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(output(0, 69, finish="stop"))
        assert await reader == output(0, 69, finish="stop")
        assert mailbox.is_finished
        assert len(taken) == 2

    asyncio.run(read())


def test_a_taker_that_fails_fails_its_reader_alone() -> None:
    async def read() -> None:
        def take(offered: Output) -> bool:
            raise ZeroDivisionError

        mailbox = Mailbox(1, no_overflow)
        mailbox.taker = take
        reader = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(output(0, 65))
        with pytest.raises(ZeroDivisionError):
            await reader

    asyncio.run(read())
