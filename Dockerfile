# Images with the command attention-nmt, which works in /work. Versions are those of constraints.txt.
#
#   docker build --target cpu --tag attention-nmt .
#   docker build --target cuda --tag attention-nmt:cuda .
FROM python:3.11-slim AS source
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs configs
COPY nmt nmt

# PyPI has PyTorch for NVIDIA GPUs, with the CUDA libraries it needs; `docker run --gpus all` brings the driver.
FROM source AS cuda
RUN pip install --no-cache-dir -c constraints.txt ".[plot,serve]"
ENV HOME=/work
WORKDIR /work
ENTRYPOINT ["attention-nmt"]

FROM source AS cpu
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu ".[plot,serve]"
ENV HOME=/work
WORKDIR /work
ENTRYPOINT ["attention-nmt"]
