# One image for every role. Roles never import torch; it is here because workers of the same image do. It is the CPU
# build, a fraction of the default one, if TORCH_INDEX names the index of PyTorch's CPU builds (docs/start/install.md).
FROM python:3.11-slim AS build
ARG TORCH_INDEX=
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/geartrain
WORKDIR /source
COPY constraints.txt pyproject.toml ./
# Dependencies first, the largest by itself: these layers are rebuilt only when they change.
RUN /opt/geartrain/bin/pip install --no-cache-dir --no-deps -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
RUN sed -n '/^\(dependencies\|serve\|onnx\) = \[/,/^\]/s/^ *"\(.*\)",$/\1/p' pyproject.toml > requirements.txt \
    && /opt/geartrain/bin/pip install --no-cache-dir -c constraints.txt -r requirements.txt redis hiredis s3fs prometheus_client
COPY CMakeLists.txt README.md LICENSE ./
COPY ams ams
COPY bridge bridge
COPY workers workers
COPY serving serving
COPY geartrain geartrain
RUN PIP_CONSTRAINT=/source/constraints.txt /opt/geartrain/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11-slim
COPY --from=build /opt/geartrain /opt/geartrain
ENV PATH=/opt/geartrain/bin:$PATH
RUN useradd --create-home --uid 1000 geartrain && mkdir /certs /data /models /snapshots \
    && chown geartrain /certs /data /models /snapshots
USER geartrain
WORKDIR /data
ENTRYPOINT ["geartrain"]
CMD ["--help"]
