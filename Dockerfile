# The five scripts in a container:
#   docker build -t medical-training .
#   docker run --rm --gpus all --shm-size 8g -v $PWD/data:/app/data:ro -v $PWD/runs:/app/runs medical-training \
#       --script train_prs_med.py --data_root data --output_dir runs/prs_med --resume_from auto
FROM python:3.11-slim-bookworm

# A C++ compiler for torch.compile and DeepSpeed; tini hands signals on and clears up processes.
RUN apt-get update && apt-get install -y --no-install-recommends g++ tini && rm -rf /var/lib/apt/lists/*

# CUDA's libraries come with torch; NVIDIA's container runtime brings the driver.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Packages change seldom, the project often: two layers.
WORKDIR /app
COPY requirements.txt ./
RUN python -m pip install --no-cache-dir --disable-pip-version-check -r requirements.txt
COPY . ./

# Not root; caches of torch, Triton and Hugging Face go to /tmp, so that the root may be read-only.
RUN useradd --uid 1000 trainer && mkdir -p data runs && chown trainer data runs
USER 1000
ENV HOME=/tmp

# One process for each GPU; the exit code is the script's.
ENTRYPOINT ["tini", "--", "./launch_distributed_training.sh"]
CMD ["--help"]
