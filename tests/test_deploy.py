"""Files for Docker, Kubernetes and systemd pass the linters of their kind; each is skipped where its linter is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from psycopg.conninfo import make_conninfo

from aqueduck.config.server import ServerConfig
from aqueduck.config.sync import parse_config
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.postgres.session.connection import connect
from aqueduck.sync.check import run_checks
from aqueduck.sync.prepare import prepare

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_passes_hadolint() -> None:
    run(tool("hadolint"), str(DEPLOY / "Dockerfile"))


def test_every_yaml_file_passes_yamllint() -> None:
    run(tool("yamllint"), "--strict", "-c", str(DEPLOY / "yamllint.yaml"), str(DEPLOY))


@pytest.mark.parametrize(
    "manifest", [m for m in MANIFESTS if m.stem != "kustomization"], ids=lambda m: m.stem
)
def test_manifests_are_valid_for_kubernetes(manifest: Path) -> None:
    """Against the schemas of the API server, with no unknown fields."""
    run(tool("kubernetes-validate"), "--strict", str(manifest))


def test_the_kustomization_lists_every_manifest() -> None:
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [m.name for m in MANIFESTS if m.stem != "kustomization"]


def test_the_compose_file_follows_the_specification() -> None:
    if importlib.util.find_spec("compose_spec") is None:
        pytest.skip("compose_spec is not installed")
    from compose_spec.models import ComposeSpecification

    values = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    model = ComposeSpecification.model_validate(values)
    assert set(model.services or {}) >= {"source", "minio", "aqueduck", "prometheus", "grafana"}


def test_images_of_the_compose_file_are_fixed() -> None:
    """The attack: whoever may move a tag in a registry has their image run here.  Ours is built from what is beside the file."""
    values = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    foreign = {
        name: service["image"] for name, service in values["services"].items() if "build" not in service
    }
    assert len(foreign) == 5
    loose = [image for image in foreign.values() if not re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", image)]
    assert loose == []


def test_what_the_compose_file_mounts_and_asks_for_exists() -> None:
    """Files that are mounted are there, and the example names every variable that is wanted."""
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    for mount in re.findall(r"- (\.{1,2}/[^:]+):", text):
        assert (DEPLOY / "compose" / mount).exists(), mount
    example = (DEPLOY / "compose" / "example.env").read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) == set(re.findall(r"^(\w+)=", example, re.MULTILINE))


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / "aqueduck.service"
    text = (DEPLOY / "systemd" / "aqueduck.service").read_text()
    unit.write_text(text.replace("/opt/aqueduck/bin/aqueduck run", "/bin/true run"))
    run(tool("systemd-analyze"), "verify", str(unit))


def test_the_systemd_unit_gives_numba_a_place_that_it_may_write() -> None:
    """Without one the package cannot be imported: the user has no home, and everything else is read-only."""
    text = (DEPLOY / "systemd" / "aqueduck.service").read_text()
    [cache] = re.findall(r"^CacheDirectory=(\S+)$", text, re.MULTILINE)
    assert f"Environment=NUMBA_CACHE_DIR=/var/cache/{cache}\n" in text


def test_the_systemd_unit_keeps_files_private_and_allows_enough_of_them() -> None:
    """Stage and lake are for its user alone, and connections of strangers leave descriptors for the service."""
    lines = (DEPLOY / "systemd" / "aqueduck.service").read_text().splitlines()
    assert {"UMask=0077", "LimitNOFILE=65536"} <= set(lines)


def test_the_image_compiles_the_kernels_that_make_compiles() -> None:
    """A start of a container waits for no compiler."""
    warmed = {
        path: set(re.findall(r"from (aqueduck\S*) import (\w+); \2\.warm_up\(\)", path.read_text()))
        for path in (ROOT / "Makefile", DEPLOY / "Dockerfile")
    }
    assert warmed[ROOT / "Makefile"] == warmed[DEPLOY / "Dockerfile"] != set()


def test_configurations_in_the_examples_are_valid() -> None:
    """What compose and Kubernetes mount is a file that the service takes."""
    config_map = yaml.safe_load((DEPLOY / "kubernetes" / "config.yaml").read_text())
    for text in (config_map["data"]["aqueduck.yaml"], (DEPLOY / "compose" / "aqueduck.yaml").read_text()):
        config = parse_config(text, base_dir=ROOT, env={"PG_DSN": "host=x", "LAKE_CATALOG": "sqlite:x"})
        assert config.server.token_env == "AQUEDUCK_TOKEN"
        assert [token.name for token in config.server.tokens] == ["prometheus"]
        assert config.maintenance.retention_hours == 168


def test_the_role_of_the_compose_file_can_do_what_the_service_does(tmp_path: Path) -> None:
    """It is no superuser, and `check` finds nothing that it lacks, in the database nor in the lake's catalog."""
    with EmbeddedPostgres(password="admin") as server:
        psql = str(server.bin("psql"))
        admin = make_conninfo(server.dsn, dbname="postgres")
        with connect(admin) as conn:
            conn.execute("create database shop")
        variables = {**os.environ, "AQUEDUCK_PASSWORD": "it's secret"}
        command = [psql, "-v", "ON_ERROR_STOP=1", "-f", str(DEPLOY / "compose" / "source.sql")]
        subprocess.run([*command, make_conninfo(admin, dbname="shop")], env=variables, check=True, timeout=60)
        ours = {"user": "aqueduck", "password": "it's secret"}
        text = (DEPLOY / "compose" / "aqueduck.yaml").read_text()
        env = {
            "PG_DSN": make_conninfo(admin, dbname="shop", **ours),
            "LAKE_CATALOG": "postgres:" + make_conninfo(admin, dbname="lake", **ours),
        }
        config = parse_config(text, base_dir=tmp_path, env=env)
        lake = config.lake.model_copy(update={"data_path": str(tmp_path / "lake")})
        local = config.model_copy(
            update={"lake": lake, "state_dir": str(tmp_path), "server": ServerConfig(enabled=False)}
        )
        list(prepare(local))
        assert [(r.name, r.detail) for r in run_checks(local) if not r.ok] == []
        with connect(env["PG_DSN"]) as conn:
            assert conn.execute("select rolsuper from pg_roles where rolname = current_user").fetchone() == (
                False,
            )
