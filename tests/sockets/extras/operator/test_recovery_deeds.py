"""Commands, webhooks and pods: a unit is acted on, with real processes and a played API server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cellgate.extras.operator import actions, kubernetes, plan
from cellgate.extras.operator.action_settings import CallWebhook, ReplacePods, RunCommand, SetImage
from cellgate.extras.operator.actions import FLOOD_BYTES, OUTPUT_KEPT
from cellgate.extras.operator.plan import RecoveryReport, RecoveryResult
from cellgate.extras.orchestrators import ApiError, ask, connected
from cellgate.proxy.config.settings import Tls
from cellgate.proxy.process.tls import LiveTls
from loadtests.kit.fake_kubernetes import FakeKubernetes, group_pod, pod
from tests.kubernetes_api import kubernetes_api, rights_given, rights_used
from tests.wire.process import eventually

PEM = Path(__file__).parents[3] / "wire" / "localhost.pem"
ABOUT = {
    "id": "a1-0123",
    "unit": "a1",
    "cell": "a",
    "url": "http://10.0.0.1:8000",
    "nodes": [
        {"name": "a1-0", "role": "leader", "agent": ""},
        {"name": "a1-1", "role": "follower", "agent": ""},
    ],
    "reason": "gone\nfor good",
    "node": "a1-1",
    "source": "agent",
    "epoch": {"agent a1-1": "b:7:1", "engine_metrics": "5"},
    "since": "2026-01-01T00:00:00.000Z",
    "attempt": 2,
    "fence": 0,
}


async def shell(script: str, timeout_s: float = 10.0) -> RecoveryReport:
    return await run(("sh", "-c", script), timeout_s)


async def run(words: tuple[str, ...], timeout_s: float = 10.0) -> RecoveryReport:
    return await actions.run_command(RunCommand(words), ABOUT, timeout_s)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_gone(pid: int) -> bool:
    return eventually(lambda: not is_alive(pid))


async def test_a_command_gets_its_evidence_and_none_of_the_gates_secrets() -> None:
    os.environ["CELLGATE_ADMIN_TOKEN"] = "secret"
    try:
        report = await shell("env | grep ^CELLGATE | sort; cat; pwd >&2")
    finally:
        del os.environ["CELLGATE_ADMIN_TOKEN"]
    *variables, told_and_pwd = report.output.splitlines()
    assert report.result is RecoveryResult.OK
    assert variables == [
        "CELLGATE_ATTEMPT=2",
        "CELLGATE_CELL=a",
        "CELLGATE_EPOCH=agent a1-1=b:7:1,engine_metrics=5",
        "CELLGATE_FENCE=0",
        "CELLGATE_ID=a1-0123",
        "CELLGATE_NODE=a1-1",
        "CELLGATE_NODES=a1-0,a1-1",
        "CELLGATE_REASON=gone\\x0afor good",
        "CELLGATE_SINCE=2026-01-01T00:00:00.000Z",
        "CELLGATE_UNIT=a1",
        "CELLGATE_URL=http://10.0.0.1:8000",
    ]
    told, end = json.JSONDecoder().raw_decode(told_and_pwd)
    assert (told, told_and_pwd[end:]) == (ABOUT, os.getcwd())


@pytest.mark.parametrize(
    ("words", "result", "detail", "output"),
    [
        (("echo", "$HOME; exit 1", "`id`"), RecoveryResult.OK, "it exited with 0", "$HOME; exit 1 `id`\n"),
        (("sh", "-c", "exec 0<&- 1>&- 2>&-"), RecoveryResult.OK, "it exited with 0", ""),
        (("sh", "-c", "echo why >&2; exit 7"), RecoveryResult.FAILED, "it exited with 7", "why\n"),
        (("sh", "-c", "echo why; kill -TERM $$"), RecoveryResult.FAILED, "killed by signal 15", "why\n"),
        (("/no/such/program",), RecoveryResult.FAILED, "/no/such/program could not be started", ""),
    ],
)
async def test_a_command_says_how_it_ended(
    words: tuple[str, ...], result: RecoveryResult, detail: str, output: str
) -> None:
    await run(words)
    before = len(os.listdir("/proc/self/fd"))
    report = await run(words)
    assert (report.result, report.output) == (result, output)
    assert detail in report.detail
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor is left behind"


async def test_a_command_that_hangs_is_killed_with_all_that_it_started() -> None:
    report = await shell("trap '' TERM; sleep 60 & echo $!; echo $$; wait", timeout_s=0.3)
    assert (report.result, report.detail) == (RecoveryResult.TIMEOUT, "killed: it did not end within 0.3 s")
    assert [is_gone(int(pid)) for pid in report.output.split()] == [True, True]


async def test_a_command_that_floods_is_killed_and_only_its_end_is_kept() -> None:
    report = await shell("yes")
    assert report.result is RecoveryResult.FLOODED
    assert report.output == "y\n" * (OUTPUT_KEPT // 2)
    report = await shell(f"head -c {FLOOD_BYTES // 2} /dev/zero | tr '\\0' x; echo end")
    assert (report.result, len(report.output)) == (RecoveryResult.OK, OUTPUT_KEPT), "it may be wordy"
    assert report.output.endswith("xxend\n")


async def test_a_child_in_the_background_that_holds_the_output_is_not_waited_for() -> None:
    report = await shell("sleep 60 & echo done $!")
    assert (report.result, report.output[:5]) == (RecoveryResult.OK, "done ")
    os.kill(int(report.output.split()[1]), 9)


async def test_a_command_ends_with_its_gate(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = f"echo $$ > {mark}.new; mv {mark}.new {mark}; sleep 60"
    running = asyncio.create_task(shell(script))
    assert await asyncio.to_thread(eventually, mark.exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert is_gone(int(mark.read_text()))


# Webhooks.

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def hook(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/hook", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http{'s' if tls else ''}://{host}:{port}/hook"
    finally:
        await runner.cleanup()


async def post(url: str, timeout_s: float = 5.0, call: actions.WebhookCall | None = None) -> RecoveryReport:
    return await (call or CALL)(CallWebhook(url, "s3cret"), ABOUT, timeout_s)


CALL = actions.caller(ssl.create_default_context(), wall=lambda: 1_700_000_000.9)


async def test_a_webhook_is_signed_over_its_time_and_body() -> None:
    got: list[tuple[Any, bytes]] = []

    async def answer(request: web.Request) -> web.Response:
        got.append((request.headers, await request.read()))
        return web.Response(status=202, text="on it")

    async with hook(answer) as url:
        assert await post(url) == RecoveryReport(RecoveryResult.OK, "it answered 202", "on it")
    ((headers, body),) = got
    assert json.loads(body) == ABOUT
    assert headers["X-Cellgate-Timestamp"] == "1700000000"
    expected = hmac.new(b"s3cret", b"1700000000." + body, hashlib.sha256).hexdigest()
    assert headers["X-Cellgate-Signature"] == f"sha256={expected}"


async def test_a_webhook_over_https_is_verified() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(PEM)
    trusting = actions.caller(LiveTls(Tls(ca=str(PEM))).webhooks())
    async with hook(answer, context) as url:
        assert (await post(url.replace("127.0.0.1", "localhost"), call=trusting)).result is RecoveryResult.OK
        refused = await post(url)
    assert refused.result is RecoveryResult.FAILED
    assert "certificate" in refused.detail.lower()


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60.0)
    raise AssertionError


async def endless(request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse(status=500)
    await reply.prepare(request)
    for _ in range(10_000):
        await reply.write(b"x" * 65536)
    return reply


async def elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/elsewhere")


@pytest.mark.parametrize(
    ("answer", "result", "detail", "kept"),
    [
        (never, RecoveryResult.TIMEOUT, "no answer within 0.3 s", 0),
        (endless, RecoveryResult.FAILED, "it answered 500", actions.ANSWER_KEPT),
        (elsewhere, RecoveryResult.FAILED, "it answered 307", len("307: Temporary Redirect")),
    ],
)
async def test_a_webhook_that_does_not_answer_well_is_bounded_and_followed_nowhere(
    answer: Answer, result: RecoveryResult, detail: str, kept: int
) -> None:
    async with hook(answer) as url:
        report = await post(url, 0.3 if answer is never else 5.0)
    assert (report.result, report.detail, len(report.output)) == (result, detail, kept)


async def test_a_webhook_that_nobody_serves_is_a_failure() -> None:
    report = await post("http://127.0.0.1:1/hook")
    assert report.result is RecoveryResult.FAILED
    assert "could not be called" in report.detail


# The log.


async def test_the_log_has_a_line_for_each_entry_on_the_disk_before_it_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        fsync(fd)

    monkeypatch.setattr("cellgate.extras.operator.plan.os.fsync", note)
    path = tmp_path / "audit.jsonl"
    await plan.record(str(path), {"n": -1})
    assert path.stat().st_size == synced[0]
    assert len(synced) == 2, "the folder as well, for a new file"
    await asyncio.gather(*(plan.record(str(path), {"n": n, "text": "x" * 5000}) for n in range(20)))
    first, *lines = path.read_text().splitlines()
    assert json.loads(first)["n"] == -1
    assert sorted(json.loads(line)["n"] for line in lines) == list(range(20))


async def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        await plan.record(str(tmp_path / "no" / "audit"), {})
    with pytest.raises(OSError, match="No space"):
        await plan.record("/dev/full", {})


async def test_a_disk_that_takes_for_ever_does_not_hold_up_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr("cellgate.extras.operator.plan.WRITE_S", 0.1)
    with pytest.raises(OSError, match=r"not written within 0\.1 s"):
        await plan.record(str(pipe), {})
    # Lets the thread go.
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))


# Pods of a unit are replaced by the official client. The API server answers as a real one does.

REPLACE_RULES = Path(__file__).parents[4] / "deploy" / "recovery" / "kubernetes-rbac.yaml"
UNIT = {**ABOUT, "unit": "big-1"}

Replace = Callable[..., Awaitable[RecoveryReport]]


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[FakeKubernetes, Replace]]:
    """Two groups of two pods and a set, and a way to replace those of a unit."""
    async with kubernetes_api() as api:
        for number, rank in ((0, 0), (0, 1), (1, 1), (1, 0)):
            ip = f"127.0.{number}.{rank + 1}"
            made = group_pod("big", number, rank, size=2, uid=f"{number}/{rank}", ip=ip)
            made["spec"]["nodeName"] = f"node-{rank}"
            await api.put(made)
            api.objects.put("nodes", "", {"metadata": {"name": f"node-{rank}"}, "spec": {}})
        kind = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
        api.objects.put("leaderworkersets", "prod", {**kind, "metadata": {"name": "big"}})

        def replace(about: Any = UNIT, **keys: Any) -> Awaitable[RecoveryReport]:
            action = ReplacePods("prod", kubeconfig=api.kubeconfig(folder), **keys)
            return kubernetes.replace_pods(action, about)

        yield api, replace


def going(api: FakeKubernetes) -> list[str]:
    return sorted(one["metadata"]["name"] for one in api.pods() if "deletionTimestamp" in one["metadata"])


async def test_a_group_is_evicted_as_a_whole_or_what_labels_choose_and_the_cluster_is_told_why(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (api, replace):
        report = await replace()
        assert (report.result, report.detail) == (RecoveryResult.OK, "evicted 2 of 2 pods")
        assert report.output == "gone: big-1 big-1-1"
        assert going(api) == ["big-1", "big-1-1"]
        (event,) = api.objects.all("events")
        regarding = event["involvedObject"]
        assert (regarding["kind"], regarding["uid"]) == ("LeaderWorkerSet", "uid-big")
        assert event["message"] == (
            "unit big-1 was DOWN since 2026-01-01T00:00:00.000Z: gone\\x0afor good; attempt 2, a1-0123"
        )
        (leader,) = (one for one in api.pods() if one["metadata"]["name"] == "big-1")
        assert leader["metadata"]["annotations"]["cellgate.io/verdict"].startswith("DOWN since 2026")
        for name, unit in (("x-1", "llama"), ("x-2", "llama"), ("x-3", "qwen")):
            labels = {"app": "x", "unit": unit}
            await api.put(pod(name, labels=labels, annotations={}, uid=name, ip="127.0.0.9"))
        report = await replace({**UNIT, "unit": "llama"}, selector="app=x,unit={unit}", evict=False)
        assert (report.result, report.detail) == (RecoveryResult.OK, "deleted 2 of 2 pods")
        assert going(api) == ["big-1", "big-1-1", "x-1", "x-2"]
        assert api.objects.all("events")[1]["involvedObject"]["name"] == "x-1"


async def test_a_right_that_is_missing_is_named(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, replace):
        for right in (("create", "pods/eviction"), ("list", "pods")):
            api.lacks = {right}
            report = await replace()
            assert report.result is RecoveryResult.REFUSED
            rule = f'{{apiGroups: [""], resources: [{right[1]}], verbs: [{right[0]}]}}'
            assert f"lacks a right in namespace prod: add the rule {rule} to its role" in report.detail
            assert going(api) == []
        # A unit without pods is refused.
        api.lacks = set()
        for unit, said in (
            ("big-7", "0 pods with leaderworkerset.sigs.k8s.io/name=big,"),
            ("llama", "unit llama is not named SET-INDEX: give a selector"),
        ):
            report = await replace({**UNIT, "unit": unit})
            assert report.result is RecoveryResult.REFUSED
            assert report.detail.startswith(said)
            assert report.detail.endswith("nothing was done")


async def test_what_is_only_told_needs_no_rights_and_a_cordoned_node_is_said(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, replace):
        api.lacks = {("patch", "pods"), ("create", "events"), ("get", "nodes"), ("get", "leaderworkersets")}
        report = await replace()
        assert report.result is RecoveryResult.OK
        assert report.detail.count("lacks a right") == 3, "each once"
        assert going(api) == ["big-1", "big-1-1"]
    async with cluster(tmp_path) as (api, replace):
        api.objects.put("nodes", "", {"metadata": {"name": "node-1"}, "spec": {"unschedulable": True}})
        report = await replace()
        assert report.result is RecoveryResult.OK
        assert "node node-1 is cordoned, so its pod is placed elsewhere if there is room" in report.detail


async def test_a_disruption_budget_is_heeded_and_quoted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, replace):
        api.disruptions = 0
        report = await replace()
        assert report.result is RecoveryResult.REFUSED
        assert "The disruption budget big needs 2 healthy pods and has 2 currently" in report.detail
        api.disruptions = 1
        report = await replace()
        assert (report.result, going(api)) == (RecoveryResult.FAILED, ["big-1"])
        assert report.detail.startswith("evicted 1 of 2 pods; big-1-1: the API server refuses: 429 Cannot")


async def test_a_pod_that_was_made_anew_meanwhile_is_left_alone(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, _replace):
        listed = next(one for one in api.pods() if one["metadata"]["name"] == "big-1")
        await api.put({**listed, "metadata": {**listed["metadata"], "uid": "again"}})
        action = ReplacePods("prod", kubeconfig=api.kubeconfig(tmp_path))
        async with connected(action.kubeconfig) as connection:
            with pytest.raises(ApiError, match="409 Precondition failed"):
                await ask(connection, kubernetes.going(action, "prod", listed))
        assert going(api) == []


async def test_the_rights_in_deploy_are_exactly_those_that_are_used(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, replace):
        await replace()
        await replace({**UNIT, "unit": "big-0"}, evict=False)
        assert rights_used(api) == rights_given(REPLACE_RULES)
        await api.stop()
        report = await replace()
        assert report.result is RecoveryResult.REFUSED
        assert report.detail.startswith("the API server cannot be reached: ")


# Groups of a LeaderWorkerSet get another image, by the official client, from the highest group down.

ROLL_RULES = Path(__file__).parents[4] / "deploy" / "recovery" / "kubernetes-roll-rbac.yaml"
OLD, NEW = "engine:1", "engine:2"


class Cluster:
    """A set of three groups of one pod, and its controller, which heeds the partition."""

    def __init__(self, api: FakeKubernetes, folder: Path) -> None:
        self.api, self._kubeconfig = api, api.kubeconfig(folder)

    async def fill(self) -> None:
        main = {"metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "engine"}}}
        containers = [{"name": "sidecar", "image": "other"}, {"name": "engine", "image": OLD}]
        templates = {"leaderTemplate": main | {"spec": {"containers": containers}}}
        templates["workerTemplate"] = {"spec": {"containers": [{"name": "engine", "image": OLD}]}}
        spec = {"replicas": 3, "leaderWorkerTemplate": templates}
        self.api.objects.put("leaderworkersets", "prod", {"metadata": {"name": "big"}, "spec": spec})
        for number in range(3):
            await self.pod(number, OLD)

    async def pod(self, number: int, image: str) -> None:
        made = group_pod("big", number, 0, size=1, uid=f"{number}{image}", ip="127.0.0.1")
        made["spec"]["containers"][0]["image"] = image
        await self.api.put(made)

    async def roll(self, number: int, image: str = NEW) -> RecoveryReport:
        action = SetImage(image, "prod", kubeconfig=self._kubeconfig)
        report = await kubernetes.set_image(action, {"unit": f"big-{number}"})
        if report.result is RecoveryResult.OK:
            for at in range(self.partition, 3):
                await self.pod(at, image)
        return report

    @property
    def spec(self) -> dict[str, Any]:
        (lws,) = self.api.objects.all("leaderworkersets")
        return dict(lws["spec"])

    @property
    def partition(self) -> int:
        return int(self.spec["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"])


@asynccontextmanager
async def in_cluster(folder: Path) -> AsyncIterator[Cluster]:
    async with kubernetes_api() as api:
        sets = Cluster(api, folder)
        await sets.fill()
        yield sets


def images(sets: Cluster) -> list[str]:
    return [pod["spec"]["containers"][0]["image"] for pod in sets.api.pods()]


async def test_groups_get_the_image_one_by_one_from_the_highest_down_and_back(tmp_path: Path) -> None:
    async with in_cluster(tmp_path) as sets:
        report = await sets.roll(2)
        assert (report.result, report.detail) == (
            RecoveryResult.OK,
            "set big has image engine:2 from group 2 on",
        )
        assert images(sets) == [OLD, OLD, NEW]
        templates = sets.spec["leaderWorkerTemplate"]
        assert [one["image"] for one in templates["leaderTemplate"]["spec"]["containers"]] == ["other", NEW]
        assert templates["workerTemplate"]["spec"]["containers"][0]["image"] == NEW
        await sets.roll(1)
        assert (images(sets), sets.partition) == ([OLD, NEW, NEW], 1)
        await sets.roll(2, OLD)
        assert (images(sets), sets.partition) == ([OLD, NEW, OLD], 2)
        await sets.roll(1, OLD)
        assert images(sets) == [OLD, OLD, OLD]
        assert rights_used(sets.api) == rights_given(ROLL_RULES)
        sets.api.lacks = {("update", "leaderworkersets")}
        rule = '{apiGroups: ["leaderworkerset.x-k8s.io"], resources: [leaderworkersets], verbs: [update]}'
        assert rule in (await sets.roll(2)).detail


@pytest.mark.parametrize(
    ("unit", "image", "said"),
    [
        (
            0,
            NEW,
            "group 1 above it has image engine:1, and would be replaced too: roll from the highest group",
        ),
        (7, NEW, "groups from 7 on"),
    ],
)
async def test_what_would_change_others_is_refused(tmp_path: Path, unit: int, image: str, said: str) -> None:
    async with in_cluster(tmp_path) as sets:
        if unit > 2:
            await sets.roll(unit, image)
        report = await sets.roll(unit, image)
        assert report.result is RecoveryResult.REFUSED
        assert report.detail.startswith(said)
        assert report.detail.endswith("nothing was done")
        assert images(sets) == [OLD, OLD, OLD]


async def test_a_set_that_was_changed_meanwhile_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_cluster(tmp_path) as sets:
        rolled = kubernetes.rolled

        def meddled(before: Any, *rest: Any) -> Any:
            sets.api.objects.put("leaderworkersets", "prod", {**before, "spec": sets.spec | {"replicas": 4}})
            return rolled(before, *rest)

        monkeypatch.setattr(kubernetes, "rolled", meddled)
        report = await sets.roll(2)
        assert report.result is RecoveryResult.REFUSED
        assert "409 Operation cannot be fulfilled" in report.detail
        assert sets.spec["replicas"] == 4
