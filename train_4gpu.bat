@echo off
rem train_4gpu.sh for Windows: the same flags, the same program.
setlocal DisableDelayedExpansion
set "python=python"
if exist "%~dp0.venv\Scripts\python.exe" set "python=%~dp0.venv\Scripts\python.exe"
"%python%" "%~dp0utils\launch_4gpu.py" %*
