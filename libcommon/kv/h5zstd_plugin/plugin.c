/* HDF5 filter 32015 as a plug-in: HDF5_PLUGIN_PATH=.../hdf5-plugin h5dump file.h5 */
#include <H5PLextern.h>
#include "../h5zstd.h"

H5PL_type_t H5PLget_plugin_type(void) { return H5PL_TYPE_FILTER; }
const void *H5PLget_plugin_info(void) { return &pd_h5z_class; }
