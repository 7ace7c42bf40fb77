#!/bin/sh
# Spark puts its packed sources first on the path, which Python compiles anew in each process. The installed ones are compiled.
path=
IFS=:
for entry in $PYTHONPATH; do
  case $entry in
    "" | */pyspark.zip | */py4j-*-src.zip) ;;
    *) path=${path:+$path:}$entry ;;
  esac
done
unset IFS
PYTHONPATH=$path
export PYTHONPATH
exec "@PYTHON@" "$@"
