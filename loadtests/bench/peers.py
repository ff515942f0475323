"""Proxies and routers that only the benchmark runs, each as whoever knows it would set it up to be cheap.

The others are those of the replay (loadtests/kit/routers.py). Each yields once it is ready.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from loadtests.kit import processes
from loadtests.kit.routers import ROOT, MissingError, Running, Setup, started

_NGINX = """\
{user}worker_processes 1;
worker_rlimit_nofile 65536;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 30000; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_max_body_size 64m;
  client_body_buffer_size 2m;
  keepalive_requests 10000000;
  upstream units {{
    least_conn;
{servers}
    keepalive 4096;
    keepalive_requests 10000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://units;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 1h;
    }}
  }}
}}
"""
_ENVOY_TYPES = "type.googleapis.com/envoy.extensions.filters"
_ENVOY = """\
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          "@type": {types}.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: gate
          stream_idle_timeout: 0s
          generate_request_id: false
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: /}}, route: {{cluster: units, timeout: 0s}}}}]
          http_filters:
          - name: router
            typed_config: {{"@type": {types}.http.router.v3.Router}}
  clusters:
  - name: units
    type: STATIC
    lb_policy: LEAST_REQUEST
    circuit_breakers:
      thresholds: [{{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}}]
    health_checks:
    - timeout: 1s
      interval: 2s
      unhealthy_threshold: 3
      healthy_threshold: 1
      http_health_check: {{path: /health}}
    load_assignment:
      cluster_name: units
      endpoints: [{{lb_endpoints: {places}}}]
"""


@contextmanager
def nginx(setup: Setup) -> Iterator[Running]:
    """One worker process; least connections, connections kept to units, bodies in memory, no log."""
    program = shutil.which("nginx")
    if program is None:
        raise MissingError("not installed; type:  apt-get install nginx-light")
    port, config = processes.free_port(), setup.folder / "nginx.conf"
    # Started by root, its worker would be nobody, who may not write here.
    user = "user root;\n" if os.geteuid() == 0 else ""
    servers = "\n".join(f"    server 127.0.0.1:{each} max_fails=0;" for each in setup.ports)
    config.write_text(_NGINX.format(user=user, folder=setup.folder, port=port, servers=servers))
    with started(
        [program, "-p", str(setup.folder), "-c", str(config)], port, "/health", setup.folder
    ) as running:
        yield running


@contextmanager
def envoy(setup: Setup) -> Iterator[Running]:
    """One worker thread; least requests, no limits, no request ids, no log."""
    program = shutil.which("envoy") or next(
        map(str, ROOT.glob(".venv-envoy/lib/python3*/site-packages/envoy/_bin/envoy")), None
    )
    if program is None:
        raise MissingError("not installed; type:  make .venv-envoy/made")
    port, config = processes.free_port(), setup.folder / "envoy.yaml"
    places = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": each}}}}
        for each in setup.ports
    ]
    config.write_text(_ENVOY.format(types=_ENVOY_TYPES, port=port, places=json.dumps(places)))
    command = [program, "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    with started(command, port, "/health", setup.folder) as running:
        yield running


@contextmanager
def litellm(setup: Setup) -> Iterator[Running]:
    """One worker, without a database; its own defaults otherwise, no log."""
    program = ROOT / ".venv-litellm" / "bin" / "litellm"
    if not (ROOT / ".venv-litellm" / "made").exists():
        raise MissingError("not installed; type:  make .venv-litellm/made")
    port, config = processes.free_port(), setup.folder / "litellm.yaml"
    models = [
        {
            "model_name": "bench",
            "litellm_params": {
                "model": "openai/bench",
                "api_base": f"http://127.0.0.1:{each}/v1",
                "api_key": "none",
            },
        }
        for each in setup.ports
    ]
    # It refuses to start without a key else.
    general = {"dangerously_permit_weak_or_unset_master_key": True}
    keys = {"model_list": models, "litellm_settings": {"telemetry": False}, "general_settings": general}
    config.write_text(yaml.safe_dump(keys))
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with started([*command, "--num_workers", "1"], port, "/health/liveliness", setup.folder) as running:
        yield running


def gate_python() -> Path:
    """What runs the gate: the Python that its users have, where there is a venv of it (see Makefile).

    The one that runs the benchmark may have been built without the optimisations that theirs has.
    """
    own = ROOT / ".venv-gate" / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


@contextmanager
def cellgate(setup: Setup, *, workers: int = 1) -> Iterator[Running]:
    """Everything on that is on by default, the access log too; room for all streams."""
    port, admin = processes.free_port(), processes.free_port()
    units = [
        {"name": f"u{number}", "url": f"http://127.0.0.1:{each}", "max_in_flight": 16384}
        for number, each in enumerate(setup.ports)
    ]
    keys = {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin}", "workers": workers}
    keys |= {"cells": [{"name": "bench", "units": units}]} | setup.gate
    config = setup.folder / "cellgate.yaml"
    config.write_text(yaml.safe_dump(keys))
    command = [str(gate_python()), "-m", "cellgate", "serve", "-c", str(config)]
    with started(command, admin, "/readyz", setup.folder) as running:
        yield Running([port], running.pid)


@contextmanager
def bare(setup: Setup) -> Iterator[Running]:
    """The floor for a proxy in Python: bare.py."""
    port = processes.free_port()
    command = [sys.executable, "-m", "loadtests.bench.bare", str(port), *map(str, setup.ports)]
    with started(command, port, "/health", setup.folder) as running:
        yield running
