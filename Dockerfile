# agl-slime on a CPU: the first command and whatever agents you mount. Written without a Docker daemon at hand: never built.
#
#     docker build -t agl-slime . && docker run --rm -v "$PWD/runs:/runs" agl-slime train --output-dir /runs/first
FROM python:3.11-slim
RUN useradd --create-home user
WORKDIR /agl-slime
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[local]"
USER user
WORKDIR /home/user
ENTRYPOINT ["agl-slime"]
CMD ["train"]
