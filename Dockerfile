# A server: docker build -t talon . && docker run -p 127.0.0.1:8000:8000 -v talon-models:/models talon
# On a GPU:  docker build -t talon:cuda --build-arg DEVICE=cuda . && docker run --gpus all -p 127.0.0.1:8000:8000 -v talon-models:/models talon:cuda
# It listens on every address: without keys (-e TALON_API_KEYS=...) publish the port to 127.0.0.1. It runs `talon serve`; arguments follow the image's name: ... talon --set model=Qwen/Qwen2.5-0.5B-Instruct
FROM python:3.12-slim AS build
ARG DEVICE=cpu
COPY . /src
RUN sh /src/docker/install.sh /opt/talon "$DEVICE"

FROM python:3.12-slim
ARG DEVICE=cpu
# Triton compiles a launcher for each kernel with the C compiler.
RUN if [ "$DEVICE" = cuda ]; then apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
COPY --from=build /opt/talon /opt/talon
RUN useradd --create-home talon && mkdir /models && chown talon /models
USER talon
ENV PATH=/opt/talon/bin:$PATH TALON_HOME=/models HF_HOME=/models/hub
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=120s --interval=10s CMD ["python3", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=3)"]
ENTRYPOINT ["talon", "serve", "--host", "0.0.0.0"]
