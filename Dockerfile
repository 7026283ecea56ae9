# The five scripts in a container:
#   docker build -t medical-training .
#   docker run --rm --gpus all --shm-size 8g -v $PWD/data:/app/data:ro -v $PWD/runs:/app/runs medical-training \
#       --script train_prs_med.py --data_root data --output_dir runs/prs_med --resume_from auto
FROM python:3.11-slim-bookworm

# torch.compile and DeepSpeed need a C++ compiler; tini forwards signals and reaps zombie processes.
RUN apt-get update && apt-get install -y --no-install-recommends g++ tini && rm -rf /var/lib/apt/lists/*

# The torch wheels contain CUDA's libraries; NVIDIA's container runtime provides the driver.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# A layer of its own caches the packages, which change less often than the project.
WORKDIR /app
COPY requirements.txt ./
RUN python -m pip install --no-cache-dir --disable-pip-version-check -r requirements.txt
COPY . ./

# Run as a normal user; torch, Triton and Hugging Face cache in /tmp, so that the root file system may be read-only.
RUN useradd --uid 1000 trainer && mkdir -p data runs && chown trainer data runs
USER 1000
ENV HOME=/tmp

# Start one process per GPU and return the script's exit code.
ENTRYPOINT ["tini", "--", "./launch_distributed_training.sh"]
CMD ["--help"]
