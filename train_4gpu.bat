@echo off
rem The Windows version of train_4gpu.sh, with the same flags.
setlocal DisableDelayedExpansion
set "python=python"
if exist "%~dp0.venv\Scripts\python.exe" set "python=%~dp0.venv\Scripts\python.exe"
"%python%" "%~dp0utils\launch_4gpu.py" %*
