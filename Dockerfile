# agl-slime on a CPU: the first command and whatever agents you mount. Written without a Docker daemon at hand: never built.
#
#     docker build -t agl-slime . && mkdir -p runs
#     docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/runs" agl-slime train --output-dir /runs/first
#
# --user: the container writes with your rights; without mkdir Docker makes the directory, and it belongs to root.
FROM python:3.11-slim
RUN useradd --create-home user && chmod 1777 /home/user
WORKDIR /agl-slime
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[local]"
USER user
ENV HOME=/home/user USER=user
WORKDIR /home/user
ENTRYPOINT ["agl-slime"]
CMD ["train"]
