"""Metrics of a stream: which there are, what they are labelled with, and who can read them."""

from __future__ import annotations

import socket
import urllib.request
from contextlib import ExitStack

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.fixtures.port import free_port

from millrace.errors import ConfigError
from millrace.follow.metrics import StreamMetrics, serve_metrics
from millrace.follow.progress import FollowProgress, SourceProgress
from millrace.workdir.stream_state import StreamState

# The names are an interface: dashboards and alerts are made of them.
GAUGES = {
    "millrace_received_lsn_bytes": 5,
    "millrace_spooled_lsn_bytes": 4,
    "millrace_applied_lsn_bytes": 3,
    "millrace_source_lsn_bytes": 9,
    "millrace_source_age_seconds": 1.5,
    "millrace_source_contact_age_seconds": 35,
    "millrace_source_silent": 1,
    "millrace_lag_bytes": 6,
    "millrace_lag_seconds": 0.5,
    "millrace_waiting_bytes": 11,
    "millrace_slot_retained_bytes": 12,
    "millrace_slot_safe_wal_bytes": 13,
    "millrace_slot_seconds_until_lost": 14,
    "millrace_apply_enabled": 1,
    "millrace_changes_per_second": 2.5,
}
COUNTERS = {
    "millrace_transactions_total": 21,
    "millrace_changes_total": 1 << 40,
    "millrace_changes_skipped_total": 23,
    "millrace_rows_overwritten_total": 24,
}


def progress_of(stream: str) -> FollowProgress:
    """One with everything known."""
    source = SourceProgress(9, 1.5, 6, 35.0, "", "extended", 12, 13, 14.0)
    return FollowProgress(
        5, 4, 3, None, 6, 0.5, True, 21, 1 << 40, 23, 24, 2.5, None, 11, source, stream,
        StreamState.FOLLOWING,
    )  # fmt: skip


def render(progress: FollowProgress | None) -> str:
    metrics = StreamMetrics()
    if progress is not None:
        metrics.update(progress)
    return generate_latest(metrics.registry).decode()


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text: str = answer.read().decode()
        return text


def test_every_metric_has_its_name_its_kind_and_the_stream_it_is_of() -> None:
    found = {
        sample.name: (family.type, sample.labels, sample.value)
        for family in parse(render(progress_of("shop")))
        for sample in family.samples
        if not {"status", "state"} & sample.labels.keys()
    }
    stream = {"stream": "shop"}
    assert found == {name: ("gauge", stream, value) for name, value in GAUGES.items()} | {
        name: ("counter", stream, value) for name, value in COUNTERS.items()
    }


def test_the_state_of_the_slot_is_1_for_the_one_it_is_in() -> None:
    (family,) = (one for one in parse(render(progress_of("shop"))) if one.name.endswith("status"))
    assert {sample.labels["status"]: sample.value for sample in family.samples} == {
        "reserved": 0, "extended": 1, "unreserved": 0, "lost": 0, "gone": 0,
    }  # fmt: skip
    assert {sample.labels["stream"] for sample in family.samples} == {"shop"}


def test_the_state_of_the_stream_is_1_for_the_one_it_is_in() -> None:
    (family,) = (one for one in parse(render(progress_of("shop"))) if one.name.endswith("state"))
    assert {sample.labels["state"]: sample.value for sample in family.samples} == {
        state: float(state == "following") for state in StreamState
    }


def test_streams_that_are_served_together_share_the_families() -> None:
    metrics = StreamMetrics()
    metrics.update(FollowProgress(stream="shop", transactions=7))
    metrics.update(progress_of("stock"))
    metrics.update(FollowProgress(stream="shop", transactions=8))
    text = generate_latest(metrics.registry).decode()
    assert text.count("# TYPE millrace_transactions_total ") == 1
    assert '\nmillrace_transactions_total{stream="shop"} 8.0\n' in text
    assert '\nmillrace_transactions_total{stream="stock"} 21.0\n' in text
    assert '\nmillrace_stream_state{state="setting up",stream="shop"} 1.0\n' in text


def test_what_is_not_known_is_no_zero() -> None:
    text = render(FollowProgress(stream="shop"))
    assert '\nmillrace_lag_bytes{stream="shop"} NaN\n' in text
    assert '\nmillrace_lag_seconds{stream="shop"} NaN\n' in text
    assert "millrace_slot_safe_wal_bytes" not in text
    assert "millrace_slot_wal_status" not in text
    assert render(None) == ""


def test_two_streams_of_one_process_do_not_mix() -> None:
    before = generate_latest(REGISTRY).count(b"millrace_")
    ports = {name: free_port() for name in ("shop", "stock")}
    with ExitStack() as stack:
        served = {name: stack.enter_context(serve_metrics(port)) for name, port in ports.items()}
        assert fetch(ports["shop"]) == ""
        served["shop"].update(FollowProgress(stream="shop", transactions=7))
        served["stock"].update(FollowProgress(stream="stock", transactions=8))
        shop, stock = fetch(ports["shop"]), fetch(ports["stock"])
        # The next one is another; what was served before is not kept.
        served["shop"].update(FollowProgress(stream="shop", transactions=9))
        assert '\nmillrace_transactions_total{stream="shop"} 9.0\n' in fetch(ports["shop"])
    assert '\nmillrace_transactions_total{stream="shop"} 7.0\n' in shop
    assert '\nmillrace_transactions_total{stream="stock"} 8.0\n' in stock
    assert "stock" not in shop
    assert "shop" not in stock
    assert generate_latest(REGISTRY).count(b"millrace_") == before == 0


def test_metrics_are_served_on_loopback_unless_told_otherwise() -> None:
    port = free_port()
    with serve_metrics(port), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port)).close()
    with serve_metrics(port, "0.0.0.0"):
        socket.create_connection(("127.0.0.2", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_port_that_is_taken_and_an_address_of_others_are_refused() -> None:
    port = free_port()
    with (
        serve_metrics(port),
        pytest.raises(ConfigError, match=f"can't serve metrics on port {port} of 127.0.0.1: "),
        serve_metrics(port),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"of 192\.0\.2\.1: "),
        serve_metrics(port, "192.0.2.1"),
    ):
        pass
