# docker build -t megakernel .                            a server for CPUs
# docker build -t megakernel:cuda --target cuda .         one for Hopper GPUs, whose driver the host has
# docker run -p 8000:8000 -v megakernel:/cache megakernel serve --host 0.0.0.0 --model smollm2-135m
# Fetched models, and GPU code that is compiled at first use, stay in /cache.

FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY . /src
RUN pip wheel --no-cache-dir --no-deps -w /wheels /src

FROM python:3.12-slim AS base
RUN useradd --create-home megakernel && install -d -o megakernel /cache
ENV MEGAKERNEL_CACHE=/cache HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["megakernel"]
CMD ["serve", "--host", "0.0.0.0"]

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=from=build,source=/wheels,target=/wheels pip install --no-cache-dir "$(echo /wheels/*.whl)[cuda]"
USER megakernel

FROM base AS cpu
RUN --mount=from=build,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
USER megakernel
