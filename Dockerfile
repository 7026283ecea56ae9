# The five scripts in a container:
#   docker build -t medical-training .
#   docker run --rm --gpus all --shm-size 8g -v $PWD/data:/app/data:ro -v $PWD/runs:/app/runs medical-training \
#       --script train_prs_med.py --data_root data --checkpoint_dir runs/prs_med --resume_from auto
FROM python:3.11-slim-bookworm

# A C++ compiler is for torch.compile and DeepSpeed's own operations; tini hands signals on and clears up processes.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ tini \
    && rm -rf /var/lib/apt/lists/*

# What NVIDIA's container runtime has to bring in: CUDA's libraries are among torch's packages, the driver is not.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The packages change seldom, the project often: two layers.
WORKDIR /app
COPY requirements.txt ./
RUN python -m pip install --no-cache-dir --disable-pip-version-check -r requirements.txt
COPY . ./

# Not root; its number owns the folders that a run may write.
RUN useradd --create-home --uid 1000 trainer && mkdir -p data runs && chown trainer data runs
USER 1000

# One process for each GPU, by torchrun where there are several; the exit code is the script's.
ENTRYPOINT ["tini", "--", "./launch_distributed_training.sh"]
CMD ["--help"]
