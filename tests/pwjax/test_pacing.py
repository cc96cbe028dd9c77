"""The time that moves take from steps stays a share of run time; urgent demotions go through."""

import pytest

from pwjax.memory.pacing import COPY_COST, Pace


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def run(pace, clock, *, step_s, page_s, boundaries, wanted=4, urgent=False, copy_s=0.0):
    """Pages taken in boundaries ``step_s`` apart that cost ``page_s`` a page, and copies ``copy_s`` for the next."""
    taken, pages = 0, wanted
    for _ in range(boundaries):
        clock.now += step_s
        pace.begin()
        pace.charge(pages * copy_s)
        pages = sum(pace.take(1, urgent) for _ in range(wanted))
        clock.now += pages * page_s
        pace.end()
        taken += pages
    return taken


@pytest.mark.parametrize("step_s", [0.0005, 0.002, 0.02])
@pytest.mark.parametrize("page_s", [1e-5, 2e-4, 5e-3])
def test_the_share_is_kept_whatever_a_step_and_a_page_cost(step_s, page_s):
    clock = Clock()
    pace = Pace(clock)
    taken = run(pace, clock, step_s=step_s, page_s=page_s, boundaries=2000)
    # Beyond the share: what was saved up at the start, and the one page that overdraws the account.
    assert pace.spent_s <= pace.share * pace.run_s + 0.02 + page_s
    assert taken > 0
    if page_s * 4 < pace.share * step_s:
        assert taken == 8000  # nothing is held back that is affordable


@pytest.mark.parametrize("copy_s", [1e-4, 5e-3])
def test_copies_and_commits_share_one_account(copy_s):
    clock = Clock()
    pace = Pace(clock)
    taken = run(pace, clock, step_s=0.01, page_s=2e-4, boundaries=2000, copy_s=copy_s)
    together = pace.spent_s + COPY_COST * pace.copies_s
    # Of what is over the share, one boundary was taken before its copies were known.
    assert together <= pace.share * pace.run_s + 0.02 + 4 * (COPY_COST * copy_s + 2e-4)
    assert together > 0.9 * pace.share * pace.run_s and taken > 0


def test_urgent_pages_always_go_and_are_paid_for_afterwards():
    clock = Clock()
    pace = Pace(clock)
    assert run(pace, clock, step_s=0.001, page_s=0.01, boundaries=5, urgent=True) == 20
    assert run(pace, clock, step_s=0.001, page_s=0.01, boundaries=100) == 0
    assert run(pace, clock, step_s=1.0, page_s=0.01, boundaries=30) > 0


def test_pauses_are_no_run_time():
    clock = Clock()
    pace = Pace(clock)
    run(pace, clock, step_s=0.01, page_s=1e-3, boundaries=10)
    before = pace.run_s
    clock.now += 3600
    pace.begin()
    assert pace.run_s - before <= 2.0
