# Generated from dev/forktree_dev/container_images/recipes.py by `make generate`; change that file.
# docker build -f docker/operator.Dockerfile -t forktree/operator .

FROM debian:bookworm-slim AS modules
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-pip \
 && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir --no-deps --target=/usr/lib/forktree/python --require-hashes -r /src/dev/forktree_dev/container_images/requirements.txt \
 && pip install --no-cache-dir --no-deps --target=/usr/lib/forktree/python /src

FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install --yes --no-install-recommends base-files python3 \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/usr/sbin:/usr/bin:/sbin:/bin
ENV PYTHONPATH=/usr/lib/forktree/python
ENV PYTHONDONTWRITEBYTECODE=1
ENV PYTHONUNBUFFERED=1
COPY --from=modules /usr/lib/forktree/python /usr/lib/forktree/python
USER 65532:65532
ENTRYPOINT ["python3", "-m", "forktree_operator"]
