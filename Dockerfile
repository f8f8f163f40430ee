# docker build --target cpu --build-arg PIP_EXTRA_INDEX_URL=URL_OF_TORCHS_CPU_BUILDS -t unbroken:cpu .
# docker build --target gpu -t unbroken:gpu .        # run with --gpus all; torch and vLLM bring CUDA's libraries
# docker run --rm unbroken:cpu demo --steps 5
FROM python:3.12-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim AS base
# Triton and torch.compile build their kernels with a compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 unbroken \
    && mkdir /work && chown unbroken /work
ENV HF_HOME=/work/.cache/huggingface
COPY --from=wheel /wheels /wheels

FROM base AS cpu
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[train,serve,client,lora,vision,postgres]"
USER 1000
WORKDIR /work
ENTRYPOINT ["unbroken"]
CMD ["--help"]

FROM base AS gpu
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[train,serve,client,lora,vision,postgres,vllm]"
USER 1000
WORKDIR /work
ENTRYPOINT ["unbroken"]
CMD ["--help"]
