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
set "help="
set "before="
set "here=%~dp0"
rem a variable of this name would hide the exit code
set "errorlevel="

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
if not "%precision%"=="bf16" if not "%precision%"=="fp16" set "precision=no"

rem A value from outside loses its quotes and then stands inside quotes, so that cmd executes nothing that is in it.
rem Numbers are checked before set /a sees them. Messages put a wrong value in between exclamation marks, which cmd
rem does after it has read the line.
if not "%method%"=="accelerate" if not "%method%"=="torchrun" goto bad_method
set "name=--num_gpus"
set "most=99"
set "value=%count%"
call :check_number
if defined wrong goto bad_number
set "most=99999"
set "name=NUMBER_OF_PROCESSORS"
set "value=1"
if defined NUMBER_OF_PROCESSORS set "value=%NUMBER_OF_PROCESSORS:"=%"
call :check_number
if defined wrong goto bad_number
set "cores=%value%"
if not defined OMP_NUM_THREADS goto threads_checked
set "name=OMP_NUM_THREADS"
set "value=%OMP_NUM_THREADS:"=%"
call :check_number
if defined wrong goto bad_number
set "OMP_NUM_THREADS=%value%"
:threads_checked

set "what=GPUs"
if defined cpu goto on_cpu
set "gpus=0"
for /f "tokens=1" %%g in ('nvidia-smi -L 2^>nul') do if "%%g"=="GPU" set /a gpus+=1
if not defined CUDA_VISIBLE_DEVICES goto counted
set "visible=0"
set "rest=%CUDA_VISIBLE_DEVICES:"=%"
:next_device
set "list=%rest%"
set "rest="
for /f "eol=, tokens=1* delims=, " %%d in ("%list%") do (
  set "rest=%%e"
  if "%%d"=="-1" (set "rest=") else set /a visible+=1
)
if defined rest goto next_device
if %visible% LSS %gpus% set "gpus=%visible%"
:counted
if %count% GTR %gpus% goto too_few
goto start
:on_cpu
set "what=CPU processes"
set "CUDA_VISIBLE_DEVICES=-1"

:start
setlocal EnableDelayedExpansion
if exist "!here!.venv\Scripts\!method!.exe" set "PATH=!PATH!;!here!.venv\Scripts"
setlocal DisableDelayedExpansion
rem Windows builds of torch have no libuv; gloo is the backend there
set "USE_LIBUV=0"
if not defined TORCH_DISABLE_SHARE_RDZV_TCP_STORE set "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
set /a "threads=cores / count"
if %threads% LSS 1 set "threads=1"
if not defined OMP_NUM_THREADS set "OMP_NUM_THREADS=%threads%"
set "script=train_accelerate.py"
if not exist "%script%" set script="%here%train_accelerate.py"
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
rem The python of the command's own environment runs it through old\launch_utils.py: the exit code is then the
rem script's, and no traceback of torchrun's follows its error.
set "python="
for %%p in (%method%.exe) do set "found=%%~dp$PATH:p"
if not defined found goto plain
if exist "%found%..\python.exe" set "python=%found%..\python.exe"
if exist "%found%python.exe" set "python=%found%python.exe"
if not exist "%here%old\launch_utils.py" goto plain
if not defined python goto plain
"%python%" "%here%old\launch_utils.py" %launch% %script%%words%
exit /b %errorlevel%
:plain
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
if "%before%"=="--mixed_precision" set "precision=%bare%"
set "before=%bare%"
if not "%bare:~0,18%"=="--mixed_precision=" exit /b
set "precision=%bare:~18%"
exit /b
:wait_for_value
set "pending=%bare%"
exit /b
:value
if "%pending%"=="--method" (set "method=%bare%") else set "count=%bare%"
set "pending="
exit /b
rem Sets wrong unless value, which has no quotes, is a whole number from 1 to `most`. The 1 before it keeps for from
rem reading ; as a comment; after that line value holds digits only.
:check_number
set "wrong=1"
if not defined value exit /b
for /f "delims=0123456789" %%x in ("1%value%") do exit /b
if "%value:~0,1%"=="0" exit /b
if not "%value:~0,5%"=="%value%" exit /b
if %value% GTR %most% exit /b
set "wrong="
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
setlocal EnableDelayedExpansion
echo error: --method must be accelerate or torchrun, not '!method!'>&2
exit /b 2
:bad_number
setlocal EnableDelayedExpansion
echo error: !name! must be a whole number from 1 to !most!, not '!value!'>&2
exit /b 2
:too_few
echo error: %count% GPUs asked for, %gpus% found; give --num_gpus with at most that many, or --cpu>&2
exit /b 2
