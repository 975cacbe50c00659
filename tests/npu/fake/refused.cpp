// The rest of what torch_npu links against. Nothing of it is served here, so each says so: with a success, operators
// would silently do nothing.
#include "device.h"

// Results are errors, handles are null; where a call has no result the value is ignored.
#define REFUSED(name) \
  FAKE_API int name() { return fake::fail(fake::unsupported, #name " is not served by the fake device"); }
#define NO_HANDLE(name) \
  FAKE_API void* name() { return nullptr; }
#define IGNORED(name) \
  FAKE_API int name() { return 0; }

REFUSED(aclopCompileAndExecute)
REFUSED(aclopSetAttrBool)
REFUSED(aclopSetAttrDataType)
REFUSED(aclopSetAttrFloat)
REFUSED(aclopSetAttrInt)
REFUSED(aclopSetAttrListBool)
REFUSED(aclopSetAttrListFloat)
REFUSED(aclopSetAttrListInt)
REFUSED(aclopSetAttrListListInt)
REFUSED(aclopSetAttrString)
REFUSED(aclGetTensorDescDimV2)
REFUSED(aclSetTensorFormat)
REFUSED(aclSetTensorPlaceMent)
REFUSED(aclSetTensorShape)
REFUSED(aclmdlFinalizeDump)
REFUSED(aclmdlInitDump)
REFUSED(aclmdlSetDump)
REFUSED(aclrtFreePhysical)
REFUSED(aclrtGetFunctionAddr)
REFUSED(aclrtMallocPhysical)
REFUSED(aclrtMapMem)
REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle)
REFUSED(aclrtReleaseMemAddress)
REFUSED(aclrtReserveMemAddress)
REFUSED(aclrtUnmapMem)
REFUSED(aclrtBinaryGetFunction)
REFUSED(aclrtBinaryLoadFromData)
REFUSED(rtDevBinaryRegister)
REFUSED(rtFunctionRegister)
REFUSED(rtGetC2cCtrlAddr)
REFUSED(rtKernelLaunch)
REFUSED(aclrtProcessReport)

NO_HANDLE(aclopCreateAttr)
NO_HANDLE(aclCreateDataBuffer)
NO_HANDLE(aclCreateTensorDesc)

IGNORED(aclSetCompileopt)  // options of a compiler that never runs here
IGNORED(aclopDestroyAttr)
IGNORED(aclDestroyDataBuffer)
IGNORED(aclDestroyTensorDesc)
IGNORED(aclGetTensorDescFormat)
IGNORED(aclGetTensorDescNumDims)
IGNORED(aclGetTensorDescType)
IGNORED(aclSetTensorDescName)
IGNORED(MsprofGetHashId)
IGNORED(MsprofRegisterCallback)
IGNORED(MsprofReportAdditionalInfo)
IGNORED(MsprofReportApi)
IGNORED(MsprofReportCompactInfo)
IGNORED(MsprofSysCycleTime)
