# The gate in an image of its own: Python, the packages of requirements/gate.lock, and the gate's wheel.
#
#   docker build -t cellgate .                                   # no extra: units by name, from a file or from Redis
#   docker build -t cellgate --build-arg EXTRAS="k8s jwt" .      # extras: dns ecs k8s (discovery) otel jwt kv-events
#   docker run -p 8000:8000 -p 9901:9901 -v ./cellgate.yaml:/etc/cellgate/cellgate.yaml:ro cellgate
#
# The base is a tag, so that it brings security fixes; a build that must be repeatable names a digest:
#   --build-arg BASE=python:3.11-slim-bookworm@sha256:...
# Give it the time its streams need: `docker stop --time 310`, or terminationGracePeriodSeconds in Kubernetes.

ARG BASE=python:3.11-slim-bookworm
FROM $BASE AS build
WORKDIR /src
# Without pip and setuptools: what runs needs neither.
RUN python -m venv --without-pip /opt/cellgate
COPY requirements requirements
ARG EXTRAS=
RUN pip install --no-cache-dir --require-hashes -r requirements/build.lock \
 && pip --python /opt/cellgate/bin/python install --no-cache-dir --require-hashes -r requirements/gate.lock \
    ${EXTRAS:+$(printf ' -r requirements/%s.lock' $EXTRAS)}
COPY pyproject.toml README.md LICENSE ./
COPY cellgate cellgate
COPY docs docs
COPY deploy/image/sbom.py deploy/image/sbom.py
# And what it is made of, for scanners: CycloneDX, made of what was installed.
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && pip --python /opt/cellgate/bin/python install --no-cache-dir --no-deps --no-index /wheels/cellgate-*.whl \
 && /opt/cellgate/bin/python deploy/image/sbom.py > /opt/cellgate/sbom.cdx.json

FROM $BASE AS runtime
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin cellgate
COPY --from=build /opt/cellgate /opt/cellgate
ENV PATH=/opt/cellgate/bin:$PATH
# By number, so that Kubernetes can see that it is not root.
USER 10001

# A simulated unit, for deploy/compose: docker build --target simunit .
FROM runtime AS simunit
WORKDIR /sim
COPY loadtests/__init__.py loadtests/__init__.py
COPY loadtests/simunit loadtests/simunit
EXPOSE 8000
ENTRYPOINT ["python", "-m", "loadtests.simunit", "--host", "0.0.0.0", "--port", "8000"]

FROM runtime
ARG BASE
ARG VERSION=unreleased
ARG REVISION=
ARG SOURCE=
LABEL org.opencontainers.image.title="cellgate" \
      org.opencontainers.image.description="A gate in front of LLM inference units of a leader and its followers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.base.name="$BASE"
EXPOSE 8000 9901
# Liveness, not readiness: a gate whose units are all down is not ready, but to restart it would cure nothing
# and cut what it still carries. Load balancers ask /readyz. Not by urllib, which would obey http_proxy.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["python", "-c", \
  "from http.client import HTTPConnection as C; c = C('127.0.0.1', 9901, timeout=2); c.request('GET', '/livez'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["cellgate"]
# These addresses win over the file's: inside a container nothing else is reachable.
CMD ["serve", "-c", "/etc/cellgate/cellgate.yaml", "--listen", "0.0.0.0:8000", "--admin", "0.0.0.0:9901"]
