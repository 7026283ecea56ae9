"""Guide 1's command, `python -m utils.hardware_utils`: the report of the module at the top."""

from hardware_utils import main

if __name__ == "__main__":
    main()
