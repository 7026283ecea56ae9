@echo off
rem train_4gpu.sh for Windows: the same flags, the same command. See --help.
setlocal DisableDelayedExpansion
set raw=%*
set "method=accelerate"
set "count=4"
set "cpu="
set "dry_run="
set "precision=no"
set "pending="
set "words="
set "word="
set "inside="
set "quoted="

rem cmd itself would split words at = and , and ; too: so the line is read character by character. raw holds an odd
rem number of quotes while it begins inside them: hence two ways of setting it.
:character
if not defined raw goto last_word
set "c=%raw:~0,1%"
set "plain=%c:"=%"
if not defined plain goto quote
if defined inside goto quoted_character
set raw=%raw:~1%
if "%c%"==" " goto end_of_word
set word=%word%%c%
goto character
:quoted_character
set "raw=%raw:~1%"
set "quoted=%quoted%%c%"
goto character
:quote
if defined inside goto closing_quote
set "inside=1"
set "raw=%raw:~1%"
goto character
:closing_quote
set "inside="
set raw=%raw:~1%
set word=%word%"%quoted%"
set "quoted="
goto character
:end_of_word
if defined word call :take
set "word="
goto character
:last_word
if defined inside (echo error: a quote is not closed>&2& exit /b 2)
if defined word call :take
if defined pending (echo error: %pending% needs a value>&2& exit /b 2)
if defined help goto help
if not "%method%"=="accelerate" if not "%method%"=="torchrun" goto bad_method
set /a "number=%count%" 2>nul
if not "%number%"=="%count%" goto bad_count
if %number% LSS 1 goto bad_count
if %number% GTR 99 goto bad_count

set "what=GPUs"
if defined cpu goto on_cpu
set "gpus=0"
for /f "tokens=1" %%g in ('nvidia-smi -L 2^>nul') do if "%%g"=="GPU" set /a gpus+=1
if not defined CUDA_VISIBLE_DEVICES goto counted
set "visible=0"
set "stop="
for %%d in (%CUDA_VISIBLE_DEVICES%) do call :visible_device %%d
if %visible% LSS %gpus% set "gpus=%visible%"
:counted
if %count% GTR %gpus% goto too_few
goto start
:on_cpu
set "what=CPU processes"
set "CUDA_VISIBLE_DEVICES=-1"

:start
set "script=train_accelerate.py"
if not exist "%script%" set "script=%~dp0train_accelerate.py"
set "quote="
if not "%script%"=="%script: =%" set "quote=1"
if defined quote set script="%script%"
if exist "%~dp0.venv\Scripts\%method%.exe" set "PATH=%PATH%;%~dp0.venv\Scripts"
rem Windows builds of torch have no libuv; gloo is the backend there
set "USE_LIBUV=0"
if not defined TORCH_DISABLE_SHARE_RDZV_TCP_STORE set "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
if not defined NUMBER_OF_PROCESSORS set "NUMBER_OF_PROCESSORS=1"
set /a "threads=NUMBER_OF_PROCESSORS / count"
if %threads% LSS 1 set "threads=1"
if not defined OMP_NUM_THREADS set "OMP_NUM_THREADS=%threads%"
if "%method%"=="torchrun" goto torchrun
set "multi= --multi_gpu"
if "%count%"=="1" set "multi="
set "launch=accelerate launch --num_processes=%count% --num_machines=1 --mixed_precision=%precision%"
set "launch=%launch% --dynamo_backend=no --main_process_port=0%multi%"
goto run
:torchrun
set "launch=torchrun --standalone --nproc_per_node=%count%"
:run
echo %count% %what% by %method%: %launch% %script%%words%
if defined dry_run exit /b 0
%launch% %script%%words%
exit /b %errorlevel%

rem One word of the command line: a flag of this file, its value, or the script's.
:take
set "bare=%word:"=%"
if defined pending goto value
if "%bare%"=="--method" goto wait_for_value
if "%bare%"=="--num_gpus" goto wait_for_value
if "%bare:~0,9%"=="--method=" set "method=%bare:~9%"& exit /b
if "%bare:~0,11%"=="--num_gpus=" set "count=%bare:~11%"& exit /b
if "%bare%"=="--cpu" set "cpu=1"& exit /b
if "%bare%"=="--dry_run" set "dry_run=1"& exit /b
if "%bare%"=="--help" set "help=1"& exit /b
if "%bare%"=="-h" set "help=1"& exit /b
set words=%words% %word%
if "%before%"=="--mixed_precision" call :set_precision "%bare%"
if "%bare:~0,18%"=="--mixed_precision=" call :set_precision "%bare:~18%"
set "before=%bare%"
exit /b
:wait_for_value
set "pending=%bare%"
exit /b
:value
if "%pending%"=="--method" (set "method=%bare%") else set "count=%bare%"
set "pending="
exit /b
:set_precision
set "precision=no"
if "%~1"=="bf16" set "precision=bf16"
if "%~1"=="fp16" set "precision=fp16"
exit /b
:visible_device
if "%~1"=="-1" set "stop=1"
if not defined stop set /a visible+=1
exit /b

:help
echo Train the X-ray to CT cascade on 4 GPUs of this machine.
echo   train_4gpu.bat --config configs/multi_view_config.json --method accelerate --wandb
echo   --method accelerate^|torchrun   what starts the processes (default accelerate; the result is the same)
echo   --num_gpus N                   processes, one per GPU (default 4)
echo   --cpu                          CPU processes instead (with --num_gpus N)
echo   --mixed_precision P, --checkpoint_dir DIR and all else go to train_accelerate.py as they are
echo   --dry_run                      print the command instead of running it
exit /b 0
:bad_method
echo error: --method must be accelerate or torchrun, not '%method%'>&2
exit /b 2
:bad_count
echo error: --num_gpus must be a whole number from 1 to 99, not '%count%'>&2
exit /b 2
:too_few
echo error: %count% GPUs asked for, %gpus% found; give --num_gpus with at most that many, or --cpu>&2
exit /b 2
