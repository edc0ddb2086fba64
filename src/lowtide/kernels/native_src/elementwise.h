// The passes of passes.cpp in both forms of map.
#include "planes.h"
#include "rows.h"
