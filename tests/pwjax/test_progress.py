"""Progress bars: one a stage, none off a terminal, resumed work is not speed."""

from pwjax.progress import Bars, silent


def test_bars_only_where_enabled(capsys):
    silent("quantizing", 1, 2)
    off = Bars()  # stderr is no terminal here
    off("quantizing", 1, 2)
    off.close()
    assert capsys.readouterr().err == ""


def test_a_bar_a_stage(capsys):
    bars = Bars(enabled=True)
    for step in (1, 2):
        bars("calibrating", step, 2)
    bars("quantizing", 9, 24)
    assert bars._bar is not None and bars._bar.initial == 8 and bars._bar.n == 9
    bars.close()
    assert "calibrating: 100%" in capsys.readouterr().err
