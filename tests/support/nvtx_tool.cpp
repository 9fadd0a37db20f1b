// A tool for tests that writes down what NVTX tells it, one JSON object a line, to the file that NVTX_TOOL_LOG names.
//
// InitializeInjectionNvtx2 and InitializeInjectionNvtxExtension hear what a program says while it runs;
// nvtxwGetInterface takes what is written afterwards (NVTX Writer). The layouts are those of NVTX's own headers, version
// 3 and writer interface 2, as far as they are needed, so that no header is.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>
#include <sys/syscall.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

struct Domain { std::string name; };
struct PayloadData { uint64_t schema; size_t size; const void* data; };
struct SchemaEntry {
    uint64_t flags, type;
    const char *name, *description;
    uint64_t detail, offset;
    const void *semantics, *reserved;
};
struct SchemaAttributes {
    uint64_t mask;
    const char* name;
    uint64_t type, flags;
    const SchemaEntry* entries;
    size_t count, size, align;
    uint64_t id;
    void* extension;
};
struct EventAttributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, payload_count;
    union { uint64_t bits; int64_t integer; double number; const PayloadData* extended; } payload;
    int32_t message_type;
    union { const char* text; const std::string* registered; } message;
};
struct Field { std::string name; uint64_t type, flags, offset; };

constexpr int32_t kInt64 = 2, kDouble = 3, kExtended = static_cast<int32_t>(0xDFBD0009);
constexpr int32_t kAscii = 1, kRegistered = 3;
constexpr uint64_t kTypeInt64 = 17, kTypeUInt64 = 18, kTypeCategory = 68, kTypeString = 80;

std::mutex lock;
uint64_t next_schema = uint64_t(1) << 32;
std::map<uint64_t, std::vector<Field>> schemas;
std::map<uint64_t, uint64_t> schema_sizes, schema_flags;
std::map<std::pair<const Domain*, uint32_t>, std::string> categories;

std::string quoted(const std::string& text) {
    std::string made = "\"";
    for (char letter : text) {
        if (letter == '"' || letter == '\\') made += '\\';
        made += letter;
    }
    return made + '"';
}

void write_line(const std::string& line) {
    const char* path = std::getenv("NVTX_TOOL_LOG");
    if (!path) return;
    if (FILE* file = std::fopen(path, "a")) {
        std::fprintf(file, "{\"thread\": %ld, %s}\n", syscall(SYS_gettid), line.c_str());
        std::fclose(file);
    }
}

std::string name_of(const Domain* domain) { return domain ? domain->name : ""; }

// Libraries have domains of their own, and say things there that this tool does not know.
bool ours(const Domain* domain) { return name_of(domain) == "nimble"; }

// The value of one field: a number of the width that its type, or the only field of its nested type, has.
std::string value_of(const unsigned char* at, uint64_t type) {
    auto nested = schemas.find(type);
    uint64_t size = type == kTypeInt64 || type == kTypeUInt64 ? 8 : 4;
    if (nested != schemas.end()) {
        if (nested->second.size() == 1) return value_of(at, nested->second[0].type);
        size = schema_sizes[type];
    }
    if (size == 8) {
        int64_t value;
        std::memcpy(&value, at, 8);
        return std::to_string(value);
    }
    uint32_t value;
    std::memcpy(&value, at, 4);
    return std::to_string(value);
}

std::string structure(const PayloadData& data) {
    std::string made = "{";
    for (const Field& field : schemas[data.schema]) {
        if (made.size() > 1) made += ", ";
        made += quoted(field.name) + ": ";
        made += value_of(static_cast<const unsigned char*>(data.data) + field.offset, field.type);
    }
    return made + "}";
}

std::string described(const Domain* domain, const EventAttributes* event) {
    std::string made = "\"domain\": " + quoted(name_of(domain));
    if (event->message_type == kRegistered) {
        made += ", \"message\": " + quoted(*event->message.registered) + ", \"registered\": true";
    } else if (event->message_type == kAscii) {
        made += ", \"message\": " + quoted(event->message.text) + ", \"registered\": false";
    }
    made += ", \"color\": " + std::to_string(event->color);
    made += ", \"category\": " + quoted(categories[{domain, event->category}]);
    if (event->payload_type == kInt64) made += ", \"payload\": " + std::to_string(event->payload.integer);
    if (event->payload_type == kDouble) made += ", \"payload\": " + std::to_string(event->payload.number);
    if (event->payload_type == kExtended) made += ", \"payload\": " + structure(*event->payload.extended);
    return made;
}

void log_event(const char* kind, const Domain* domain, const EventAttributes* event) {
    if (!ours(domain)) return;
    std::lock_guard<std::mutex> held(lock);
    write_line(std::string("\"event\": \"") + kind + "\", " + described(domain, event));
}

uint64_t keep_schema(const SchemaAttributes* given) {
    uint64_t id = next_schema++;
    for (size_t index = 0; index < given->count; ++index) {
        const SchemaEntry& entry = given->entries[index];
        schemas[id].push_back({entry.name ? entry.name : "", entry.type, entry.flags, entry.offset});
    }
    schema_sizes[id] = given->size;
    schema_flags[id] = given->flags;
    return id;
}

// -- while the program runs -------------------------------------------------------------------------------------------

Domain* domain_create(const char* name) {
    std::lock_guard<std::mutex> held(lock);
    write_line("\"event\": \"domain\", \"domain\": " + quoted(name));
    return new Domain{name};
}
void domain_destroy(Domain*) {}
const std::string* register_string(Domain*, const char* text) { return new std::string(text); }
void name_category(Domain* domain, uint32_t id, const char* name) {
    std::lock_guard<std::mutex> held(lock);
    categories[{domain, id}] = name;
}
void mark(Domain* domain, const EventAttributes* event) { log_event("mark", domain, event); }
int push(Domain* domain, const EventAttributes* event) { log_event("push", domain, event); return 0; }
int pop(Domain* domain) {
    if (!ours(domain)) return 0;
    std::lock_guard<std::mutex> held(lock);
    write_line("\"event\": \"pop\", \"domain\": " + quoted(name_of(domain)));
    return 0;
}
uint64_t start(Domain* domain, const EventAttributes* event) { log_event("start", domain, event); return 1; }
void end(Domain*, uint64_t) {}
uint64_t register_schema(Domain*, const SchemaAttributes* given) {
    std::lock_guard<std::mutex> held(lock);
    return keep_schema(given);
}

using Function = void (*)();
struct Callbacks { size_t size; int (*table)(int module, Function*** table, unsigned* size); };
struct Segment { size_t id, count; intptr_t* functions; };
struct Module { uint16_t version, size, id, compatible; size_t count; Segment* segments; };

template <typename F> Function plain(F* function) { return reinterpret_cast<Function>(function); }

}  // namespace

EXPORTED int InitializeInjectionNvtx2(const void* (*exported)(uint32_t)) {
    constexpr int kCallbacks = 1, kDomains = 5;
    const auto* callbacks = static_cast<const Callbacks*>(exported(kCallbacks));
    Function** table = nullptr;
    unsigned size = 0;
    if (!callbacks || !callbacks->table(kDomains, &table, &size) || size < 15) return 0;
    *table[1] = plain(mark);
    *table[2] = plain(start);
    *table[3] = plain(end);
    *table[4] = plain(push);
    *table[5] = plain(pop);
    *table[8] = plain(name_category);
    *table[10] = plain(register_string);
    *table[12] = plain(domain_create);
    *table[14] = plain(domain_destroy);
    return 1;
}

EXPORTED int InitializeInjectionNvtxExtension(Module* module) {
    constexpr uint16_t kPayloads = 2;
    if (module->id == kPayloads) module->segments[0].functions[0] = reinterpret_cast<intptr_t>(register_schema);
    return 1;
}

// -- afterwards -------------------------------------------------------------------------------------------------------

namespace {

struct Session { std::string name, config; };
struct Scope { std::string path; uint64_t parent; };
struct Stream { std::string name; Domain* domain; uint64_t scope; };
struct SessionAttributes { size_t size; const char *name, *config; };
struct DomainAttributes { size_t size; const char* name; };
struct ScopeAttributes { size_t size; const char* path; uint64_t parent, id; };
struct StreamAttributes { size_t size; const char* name; Domain* domain; uint64_t scope, clock; int16_t orders[2]; };
struct Batch { uint64_t schema; size_t size; const void* events; uint64_t scope, flags; };

std::vector<Scope> scopes;
constexpr uint64_t kScopes = uint64_t(1) << 32;

std::string path_of(uint64_t scope) {
    if (scope < kScopes) return "";
    const Scope& one = scopes[scope - kScopes];
    std::string above = path_of(one.parent);
    return above.empty() ? one.path : above + "/" + one.path;
}

int session_begin(const SessionAttributes* given, Session** made) {
    *made = new Session{given->name ? given->name : "", given->config ? given->config : ""};
    write_line("\"event\": \"session\", \"name\": " + quoted((*made)->name));
    return 0;
}
int session_end(Session*) { write_line("\"event\": \"session end\""); return 0; }
int writer_domain(Session*, const DomainAttributes* given, Domain** made) {
    *made = domain_create(given->name ? given->name : "");
    return 0;
}
int writer_category(Domain* domain, uint32_t id, const char* name) { name_category(domain, id, name); return 0; }
int writer_string(Domain*, const char* text, const std::string** made) { *made = new std::string(text); return 0; }
int writer_scope(Domain*, const ScopeAttributes* given, uint64_t* id) {
    scopes.push_back({given->path, given->parent});
    *id = kScopes + scopes.size() - 1;
    return 0;
}
int writer_schema(Domain*, const SchemaAttributes* given, uint64_t* id) { *id = keep_schema(given); return 0; }
int stream_open(Session*, const StreamAttributes* given, Stream** made) {
    *made = new Stream{given->name, given->domain, given->scope};
    return 0;
}
int stream_close(Stream*) { return 0; }

// Fields say by type what they are: a message is a string's handle, a category an id; the rest are numbers.
int write_rows(Stream* stream, uint64_t schema, const void* rows, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(rows);
    for (size_t row = 0; row + schema_sizes[schema] <= size; row += schema_sizes[schema]) {
        std::string line = "\"event\": \"range\", \"kind\": " + std::to_string(schema_flags[schema]);
        line += ", \"domain\": " + quoted(name_of(stream->domain)) + ", \"stream\": " + quoted(stream->name);
        line += ", \"scope\": " + quoted(path_of(stream->scope));
        for (const Field& field : schemas[schema]) {
            const unsigned char* at = bytes + row + field.offset;
            line += ", " + quoted(field.name) + ": ";
            if (field.type == kTypeString) {
                const std::string* text;
                std::memcpy(&text, at, sizeof text);
                line += quoted(*text);
            } else if (field.type == kTypeCategory) {
                uint32_t id;
                std::memcpy(&id, at, 4);
                line += quoted(categories[{stream->domain, id}]);
            } else {
                line += value_of(at, field.type);
            }
        }
        write_line(line);
    }
    return 0;
}
int event_write(Stream* stream, const PayloadData* payloads, size_t count) {
    for (size_t index = 0; index < count; ++index) {
        const PayloadData& one = payloads[index];
        if (int code = write_rows(stream, one.schema, one.data, one.size)) return code;
    }
    return 0;
}
int batch_write(Stream* stream, const Batch* batch) {
    return write_rows(stream, batch->schema, batch->events, batch->size);
}
int unsupported() { return 7; }

Function writer[20 + 43];

}  // namespace

EXPORTED int nvtxwGetInterface(int version, const void** table) {
    if (version != 2) return 6;
    Function made[20] = {
        plain(session_begin), plain(session_end),   plain(writer_domain), plain(writer_category), plain(writer_string),
        plain(unsupported),   plain(writer_scope),  plain(writer_schema), plain(unsupported),     plain(unsupported),
        plain(unsupported),   plain(stream_open),   plain(stream_close),  plain(event_write),     plain(batch_write),
        plain(unsupported),   plain(unsupported),   plain(unsupported),   plain(unsupported),     plain(unsupported),
    };
    std::memcpy(writer, made, sizeof made);
    *table = writer;
    return 0;
}
