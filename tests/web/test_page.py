"""
The page in a real browser: what it shows in each state of a service, and how it behaves.

Needs playwright and a Chromium of the system; without one of them the tests are skipped and say why.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aqueduck.config.server import ServerConfig
from aqueduck.model.lifecycle import SyncState
from aqueduck.overview.values import FanoutCounts, Problem, SeedOverview, VerificationOverview, VerifyOverview
from aqueduck.web.server import serve
from tests.web.conftest import TOKEN, Client
from tests.web.made_up import (
    COPYING,
    FAILED,
    Stage,
    destination,
    events_flow,
    fanout,
    group,
    many_destinations,
    overview,
    sync,
    table,
)

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

SECONDS_MAX = 60_000  # ms, in which something has to appear
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = driver.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address; afterwards no page may have had an error or asked another host."""
    contexts: list[Any] = []
    problems: list[str] = []
    asked: set[str] = set()
    hosts: set[str] = set()

    def visit(address: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(SECONDS_MAX)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.add(request.url))
        hosts.add(address)
        page.goto(address)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []
    assert {url for url in asked if not url.startswith(tuple(hosts))} == set()


def verdict(page: Any, text: str) -> None:
    playwright.expect(page.get_by_role("heading", level=1)).to_have_text(text, timeout=SECONDS_MAX)


def row_of(page: Any, name: str) -> Any:
    return page.get_by_role("row").filter(has_text=name)


def unlock(page: Any, token: str = TOKEN) -> None:
    page.get_by_role("button", name="Unlock actions").click()
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_role("button", name="Unlock", exact=True).click()


def test_a_healthy_service_is_shown_live(client: Client, open_page: Callable[..., Any]) -> None:
    """Figures, charts and rows follow the service without a reload."""
    client.stage.now = overview(sync(group(table(inserts=5, rows_synced=1234))))
    page = open_page(client.address)
    verdict(page, "Everything flows")
    playwright.expect(row_of(page, "public.orders")).to_contain_text("streaming")
    playwright.expect(row_of(page, "public.orders")).to_contain_text("1,234")
    drawn = re.compile(
        ".{41,}", re.DOTALL
    )  # the page's policy refuses to evaluate a condition again and again
    playwright.expect(page.locator(".chart-line").first).to_have_attribute("d", drawn, timeout=SECONDS_MAX)
    client.stage.now = overview(sync(group(table(inserts=5, rows_synced=4321))))
    playwright.expect(row_of(page, "public.orders")).to_contain_text("4,321", timeout=SECONDS_MAX)
    assert re.match(r"Freshness: .* now", page.get_by_role("img").first.get_attribute("aria-label"))


def test_a_difference_is_loud_and_a_good_verdict_has_its_age(
    client: Client, open_page: Callable[..., Any]
) -> None:
    """P-T01: a table that streams and differs is among what needs attention, with the step that repairs it."""
    now = datetime.now(UTC)
    good = VerifyOverview(verdict="identical", at=now, identical_at=now)
    bad = VerifyOverview(verdict="different", at=now, differences=2, note="2 keys differ (2 missing)")
    hint = "aqueduck tables resync -c FILE public.orders"
    problem = Problem(
        code="verify.different", message="it differs", hint=hint, group="shop", table="public.orders"
    )
    counted = VerificationOverview(interval_seconds=3600, deep=True, identical=2, oldest_at=now)
    client.stage.now = overview(
        sync(group(table(verified=good), table("public.items", verified=good)), verification=counted)
    )
    page = open_page(client.address)
    verdict(page, "Everything flows")
    playwright.expect(row_of(page, "public.orders")).to_contain_text("verified")
    playwright.expect(page.get_by_text("identical,")).to_be_visible()
    client.stage.now = overview(
        sync(
            group(table(verified=bad, error=problem), table("public.items", verified=good)),
            verification=replace(counted, identical=1, different=1, oldest_at=None),
        )
    )
    verdict(page, "1 thing needs attention")
    playwright.expect(row_of(page, "public.orders")).to_contain_text("differs from its source")
    playwright.expect(page.get_by_text(hint)).to_be_visible()
    playwright.expect(page.get_by_text("1 different")).to_be_visible()


def test_an_events_flow_shows_its_place_and_its_sink(client: Client, open_page: Callable[..., Any]) -> None:
    """Events that were delivered, the bookmark, where they go; no list of tables that it does not have."""
    client.stage.now = overview(events_flow())
    page = open_page(client.address)
    verdict(page, "Everything flows")
    card = page.get_by_role("article").filter(has_text="faucet_slot")
    for text in ("events from shop to jsonl /data/changes.jsonl", "Bookmark", "0/16B3748", "1,200", "51,200"):
        playwright.expect(card).to_contain_text(text)
    playwright.expect(page.locator("#tables")).to_be_hidden()


def test_copies_show_how_far_they_are(client: Client, open_page: Callable[..., Any]) -> None:
    """A table that is copied has a bar, its share and what is parked meanwhile."""
    client.stage.now = overview(sync(group(table(), COPYING)))
    page = open_page(client.address)
    verdict(page, "Copying 1 table")
    row = row_of(page, "public.items")
    assert row.get_by_role("progressbar").evaluate("bar => bar.value") == 0.41
    playwright.expect(row).to_contain_text("41 %")
    playwright.expect(row).to_contain_text("1,200 parked")


def test_errors_come_with_their_next_step(client: Client, open_page: Callable[..., Any]) -> None:
    """A failed table is counted, named and explained, with its hint; a failed destination too."""
    page = open_page(client.address)
    verdict(page, "2 things need attention")
    errors = page.get_by_role("region", name="Errors")
    playwright.expect(errors).to_contain_text("lake.value")
    playwright.expect(errors).to_contain_text("public.prices, bolt")
    playwright.expect(errors).to_contain_text("widen the lake column, or copy the table again")
    playwright.expect(row_of(page, "public.prices").first).to_contain_text("52 parked")


def test_a_stalled_flow_is_the_first_thing_one_reads(
    server_of: Callable[..., Client], open_page: Callable[..., Any]
) -> None:
    """What turns `/readyz` red turns the page red, with the reason."""
    client = server_of(Stage(overview(sync(group(table(), lag_bytes=9)))), stall_seconds=1)
    page = open_page(client.address)
    verdict(page, "No progress")
    playwright.expect(page.locator("#verdict-text")).to_contain_text("do not reach the lake")


def test_a_server_that_is_gone_is_announced_and_found_again(open_page: Callable[..., Any]) -> None:
    """A banner says that the server is away and how old the picture is; when it is back, the page recovers automatically."""
    stage = Stage(overview(sync(group(table()))))
    with ExitStack() as first:
        address = first.enter_context(serve(ServerConfig(port=0), stage, stage, interval=0.1))
        assert address is not None
        page = open_page(address)
        verdict(page, "Everything flows")
    banner = page.get_by_role("alert").filter(has_text="does not answer")
    playwright.expect(banner).to_be_visible(timeout=SECONDS_MAX)
    verdict(page, "No connection")
    port = int(address.rstrip("/").rpartition(":")[2])
    stage.now = overview(sync(group(table("public.new_one"))))
    with serve(ServerConfig(port=port), stage, stage, interval=0.1):
        verdict(page, "Everything flows")
        playwright.expect(banner).to_have_count(0)
        playwright.expect(row_of(page, "public.new_one")).to_be_visible()
        playwright.expect(row_of(page, "public.orders")).to_have_count(0)


def test_two_thousand_destinations_stay_fast(client: Client, open_page: Callable[..., Any]) -> None:
    """Only rows that can be seen are elements; filter, sort and scrolling reach all of them."""
    client.stage.now = overview(many_destinations(2000))
    page = open_page(client.address)
    rows = page.get_by_role("region", name="Destinations").get_by_role("row")
    playwright.expect(page.get_by_text("2,000 destinations")).to_be_visible()
    assert rows.count() < 60
    page.get_by_label("Filter destinations").fill("tenant-1999")
    playwright.expect(rows).to_have_count(2)
    playwright.expect(page.get_by_text("1 of 2,000 destinations")).to_be_visible()
    page.get_by_label("Filter destinations").fill("")
    page.get_by_role("button", name="Destination", exact=True).click()
    page.get_by_role("button", name="Destination", exact=True).click()
    playwright.expect(rows.nth(1)).to_contain_text("tenant-1999")
    page.get_by_role("table", name="Destinations").evaluate("list => { list.scrollTop = list.scrollHeight }")
    playwright.expect(row_of(page, "tenant-0000")).to_be_visible()
    page.get_by_role("button", name=re.compile("^errored")).click()
    playwright.expect(page.get_by_text("6 of 2,000 destinations")).to_be_visible()


def test_a_fan_out_shows_its_seed_its_reads_and_a_source_out_of_reach(
    client: Client, open_page: Callable[..., Any]
) -> None:
    """P-F17, P-F18: what a fan-out does now, what it counted, each destination's lag and next try, and why it cannot continue."""
    counts = FanoutCounts(cycles=310, reads=310, rows_read=1_234_567, unrouted_rows=42)
    seed = SeedOverview(destinations=1, rows=310, rows_total=1000, share=0.31)
    live = destination("acme", position=90, lag_snapshots=2, lag_seconds=3.0, rows_replicated=4321)
    failing = destination("bolt", "errored", error=FAILED, retry_at=datetime.now(UTC) + timedelta(seconds=90))
    flow = fanout(live, destination("cone", "seeding"), failing, counts=counts, seed=seed)
    client.stage.now = overview(replace(flow, destinations=flow.destinations[:2]))
    page = open_page(client.address)
    verdict(page, "Seeding 1 destination")
    card = page.get_by_role("article").filter(has_text="tenants")
    playwright.expect(card).to_contain_text("seeding 1 destination, 31 %")
    playwright.expect(card).to_contain_text("1.23M")
    playwright.expect(row_of(page, "acme")).to_contain_text("3.0 s behind")
    playwright.expect(row_of(page, "acme")).to_contain_text("4,321")
    client.stage.now = overview(replace(flow, error=Problem(code="lake.catalog", message="it is refused")))
    verdict(page, "The source cannot be read")
    playwright.expect(card).to_contain_text("lake.catalog: it is refused")
    playwright.expect(row_of(page, "bolt")).to_contain_text("lake.value · retry in")
    assert page.locator("#tables").is_hidden()


def test_an_update_of_two_thousand_rows_is_drawn_at_once(
    client: Client, open_page: Callable[..., Any]
) -> None:
    """To sort, filter and paint a full list takes less than a frame budget that a person would notice."""
    client.stage.now = overview(many_destinations(2000))
    page = open_page(client.address)
    playwright.expect(page.get_by_text("2,000 destinations")).to_be_visible()
    took = page.evaluate(
        """() => {
            const box = document.querySelector('[aria-label="Filter destinations"]');
            const began = performance.now();
            for (const text of ['t', 'te', 'tenant-1', '']) {
                box.value = text;
                box.dispatchEvent(new Event('input'));
            }
            return (performance.now() - began) / 4;
        }"""
    )
    assert took < 250, f"{took:.0f} ms for one arrangement"


def test_actions_want_the_token_and_a_yes(client: Client, open_page: Callable[..., Any]) -> None:
    """Without the token there are no buttons; with it, each one asks before it acts."""
    client.stage.now = overview(sync(group(table())))
    page = open_page(client.address)
    verdict(page, "Everything flows")
    resync = page.get_by_role("button", name="Resync public.orders")
    playwright.expect(resync).to_have_count(0)
    unlock(page, "wrong-wrong-wrong-wrong")
    playwright.expect(page.get_by_text("This is not the server's token.")).to_be_visible()
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.keyboard.press("Enter")
    resync.click()
    playwright.expect(page.get_by_role("dialog")).to_contain_text("Copy public.orders again?")
    page.get_by_role("button", name="Cancel").click()
    assert client.stage.calls == []
    resync.click()
    page.get_by_role("dialog").get_by_role("button", name="Resync").click()
    playwright.expect(page.get_by_text("public.orders will be re-copied")).to_be_visible()
    assert client.stage.calls == [("resync_table", {0: "public.orders", "group_name": "shop"})]


def test_a_group_is_paused_and_resumed(client: Client, open_page: Callable[..., Any]) -> None:
    """The button offers to pause a running group, and to resume a paused one."""
    client.stage.now = overview(sync(group(table())))
    page = open_page(client.address)
    unlock(page)
    page.get_by_role("button", name="Pause the group shop").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    playwright.expect(page.get_by_text("the group shop stops")).to_be_visible()
    client.stage.now = overview(sync(group(table(), state="disabled")))
    page.get_by_role("button", name="Resume the group shop").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    playwright.expect(page.get_by_text("the group shop resumes")).to_be_visible()
    assert [name for name, _ in client.stage.calls] == ["disable_group", "enable_group"]


def test_a_server_without_a_token_offers_nothing(
    server_of: Callable[..., Client], open_page: Callable[..., Any]
) -> None:
    """Where nothing can be changed there is no button that would try."""
    page = open_page(server_of(Stage(overview(sync(group(table()))))).address)
    verdict(page, "Everything flows")
    playwright.expect(page.get_by_role("button", name="Unlock actions")).to_have_count(0)


def test_elsewhere_the_page_asks_for_the_token_first(
    server_of: Callable[..., Client], open_page: Callable[..., Any]
) -> None:
    """On an address that others reach, nothing is shown before the token is given."""
    client = server_of(Stage(overview(sync(group(table())))), host="0.0.0.0", token_env="TOKEN")
    page = open_page(client.address.replace("0.0.0.0", "127.0.0.1"))
    playwright.expect(page.get_by_role("dialog")).to_contain_text("shows nothing without its token")
    assert "public.orders" not in page.content()
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.keyboard.press("Enter")
    verdict(page, "Everything flows")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(
    client: Client, open_page: Callable[..., Any], scheme: str
) -> None:
    """Nothing is wider than a phone, and text contrasts with its background in both schemes."""
    client.stage.now = overview(*client.stage.now.flows, many_destinations(50), lake=client.stage.now.lake)
    page = open_page(client.address, viewport=PHONE, color_scheme=scheme)
    playwright.expect(row_of(page, "tenant-0005").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(244, 247, 247)" if scheme == "light" else "rgb(12, 20, 24)"
    )
    for selector in (".pill", ".sub", ".chart figcaption", ".hint code", ".verdict p"):
        assert contrast(page, selector) >= 4.5, selector


@pytest.mark.parametrize("width", [390, 760, 820, 1000, 1280])
def test_buttons_stay_inside_their_rows(client: Client, open_page: Callable[..., Any], width: int) -> None:
    """At any width the buttons of a row can be pressed whole."""
    page = open_page(client.address, viewport={"width": width, "height": 900})
    unlock(page)
    retry = page.get_by_role("button", name="Retry public.prices")
    playwright.expect(retry).to_be_visible()
    row = row_of(page, "public.prices").first.bounding_box()
    for button in (retry, page.get_by_role("button", name="Resync public.prices")):
        box = button.bounding_box()
        assert row["x"] <= box["x"]
        assert box["x"] + box["width"] <= row["x"] + row["width"]
        assert row["y"] <= box["y"]
        assert box["y"] + box["height"] <= row["y"] + row["height"]


def test_it_works_without_a_mouse(client: Client, open_page: Callable[..., Any]) -> None:
    """The first stop of the keyboard leads to the content; headings sort with Enter; Escape closes a dialog."""
    client.stage.now = overview(sync(group(table("public.a"), table("public.b"))))
    page = open_page(client.address)
    verdict(page, "Everything flows")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    header = page.get_by_role("columnheader", name="Rows")
    header.get_by_role("button").focus()
    page.keyboard.press("Enter")
    playwright.expect(header).to_have_attribute("aria-sort", "descending")
    page.get_by_role("button", name="Unlock actions").focus()
    page.keyboard.press("Enter")
    playwright.expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    playwright.expect(page.get_by_role("dialog")).to_have_count(0)


def test_everything_that_can_be_used_has_a_name(client: Client, open_page: Callable[..., Any]) -> None:
    """A screen reader can say what each button, field and link is for."""
    page = open_page(client.address)
    verdict(page, "2 things need attention")
    unlock(page)
    playwright.expect(page.get_by_role("button", name="Retry public.prices")).to_be_visible()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, a, input, progress, [role=img], [role=table]')]
            .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
            .map(e => e.outerHTML)"""
    )
    assert nameless == []


def test_names_are_text_and_never_markup(client: Client, open_page: Callable[..., Any]) -> None:
    """A table may be called anything."""
    odd = 'public."<img src=x onerror=alert(1)>"'
    client.stage.now = overview(sync(group(table(odd, SyncState.STREAMING))))
    page = open_page(client.address)
    playwright.expect(row_of(page, odd)).to_be_visible()
    assert page.locator("#tables img").count() == 0


def contrast(page: Any, selector: str) -> float:
    """The ratio of WCAG between the text of an element and what is behind it."""
    return float(
        page.locator(selector).first.evaluate(
            """element => {
                const rgb = text => text.match(/[0-9.]+/g).map(Number);
                const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
                    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
                    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
                let behind = element;
                while (behind && (rgb(getComputedStyle(behind).backgroundColor)[3] ?? 1) < 1) behind = behind.parentElement;
                const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(c => light(rgb(c)));
                return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
            }"""
        )
    )
