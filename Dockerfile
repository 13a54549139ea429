# Images with the command attention-nmt, which works in /work. Versions are those of constraints.txt.
#
#   docker build --target cpu --tag attention-nmt .
#   docker build --target cuda --tag attention-nmt:cuda .
FROM python:3.11-slim AS source
# The first process of a container ignores a signal that it does not handle: SIGTERM while PyTorch is imported, and the
# second one, which is to end training at once. tini is the first process and passes signals on.
RUN apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs configs
COPY nmt nmt
ENV HOME=/work
WORKDIR /work
ENTRYPOINT ["tini", "--", "attention-nmt"]

# PyPI has PyTorch for NVIDIA GPUs, with the CUDA libraries it needs; `docker run --gpus all` brings the driver.
FROM source AS cuda
RUN pip install --no-cache-dir -c /source/constraints.txt "/source[plot,serve]"

FROM source AS cpu
RUN pip install --no-cache-dir -c /source/constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu "/source[plot,serve]"
