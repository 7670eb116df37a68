# Generated from dev/forktree_dev/container_images/recipes.py by `make generate`; change that file.
# docker build -f docker/node.Dockerfile -t forktree/node .

# Root file systems are made by chroot and mmdebstrap: needs a builder that runs as root.
FROM debian:bookworm AS guests
RUN apt-get update \
 && apt-get install --yes --no-install-recommends busybox-static ca-certificates cargo-web cpio erofs-utils gcc kmod libc6-dev lz4 mmdebstrap python3 rustc-web util-linux \
 && rm -rf /var/lib/apt/lists/*
COPY . /src
WORKDIR /src/dev
RUN mkdir -p /usr/share/forktree/guest /usr/lib/forktree \
 && cp -rL "$(python3 -m forktree_dev.images --name=tiny --name=python --name=gym | tail -n 1)/." /usr/share/forktree/guest \
 && cp "$(python3 -m forktree_dev.native | head -n 1)" /usr/lib/forktree/libforktree_shim.so

FROM debian:bookworm-slim AS modules
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-pip \
 && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir --no-deps --target=/usr/lib/forktree/python --require-hashes -r /src/dev/forktree_dev/container_images/requirements.txt \
 && pip install --no-cache-dir --no-deps --target=/usr/lib/forktree/python /src

FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install --yes --no-install-recommends base-files nftables passt python3 qemu-system-x86 \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/usr/sbin:/usr/bin:/sbin:/bin
ENV PYTHONPATH=/usr/lib/forktree/python
ENV PYTHONDONTWRITEBYTECODE=1
ENV PYTHONUNBUFFERED=1
COPY --from=modules /usr/lib/forktree/python /usr/lib/forktree/python
COPY --from=guests /usr/share/forktree/guest /usr/share/forktree/guest
COPY --from=guests /usr/lib/forktree/libforktree_shim.so /usr/lib/forktree/libforktree_shim.so
USER 0:0
ENTRYPOINT ["python3", "-m", "forktree_agent"]
