import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.ProtoUtils;
import java.io.Reader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Iterator;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import quire.inference.v1.Chunk;
import quire.inference.v1.GenerateRequest;
import quire.inference.v1.Generation;
import quire.inference.v1.InferenceServiceGrpc;
import quire.inference.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import quire.inference.v1.Position;
import quire.inference.v1.ResumeRequest;
import quire.inference.v1.ResumeResponse;
import quire.inference.v1.Sampling;
import quire.inference.v1.Stopping;
import quire.inference.v1.StreamGenerateRequest;
import quire.inference.v1.StreamGenerateResponse;

/**
 * Quire from Java: java Example ADDRESS SERVICE_CONFIG
 *
 * <p>Needs grpc-netty, grpc-protobuf, grpc-stub and gson, and the code that protoc generates with --java_out and
 * --grpc-java_out from inference.proto, google/rpc/status.proto and google/rpc/error_details.proto.
 */
public final class Example {
  private static final Metadata.Key<com.google.rpc.Status> DETAILS =
      Metadata.Key.of(
          "grpc-status-details-bin", ProtoUtils.metadataMarshaller(com.google.rpc.Status.getDefaultInstance()));

  private final InferenceServiceBlockingStub service;

  private Example(InferenceServiceBlockingStub service) {
    this.service = service;
  }

  public static void main(String[] arguments) throws Exception {
    Map<?, ?> config;
    try (Reader reader = Files.newBufferedReader(Path.of(arguments[1]))) {
      config = new Gson().fromJson(reader, Map.class);
    }
    @SuppressWarnings("unchecked")
    ManagedChannel channel =
        ManagedChannelBuilder.forTarget(arguments[0])
            .usePlaintext()
            .enableRetry()
            .defaultServiceConfig((Map<String, ?>) config)
            .build();
    Example example = new Example(InferenceServiceGrpc.newBlockingStub(channel));
    example.generate();
    example.stream();
    example.fail();
    example.resume();
    channel.shutdown().awaitTermination(10, TimeUnit.SECONDS);
  }

  /** One response with the whole text. */
  private void generate() {
    Generation generation = generation().setSampling(Sampling.newBuilder().setTemperature(0)).build();
    GenerateRequest request = GenerateRequest.newBuilder().setGeneration(generation).build();
    System.out.println("generated: " + limited().generate(request).getCompletions(0).getText());
  }

  /** Chunks as they come, between the acceptance and the usage. */
  private void stream() {
    StringBuilder text = new StringBuilder();
    StreamGenerateRequest request = StreamGenerateRequest.newBuilder().setGeneration(generation()).build();
    for (Iterator<StreamGenerateResponse> messages = limited().streamGenerate(request); messages.hasNext(); ) {
      text.append(messages.next().getChunk().getText());
    }
    System.out.println("streamed: " + text);
  }

  /** An error: its code, its reason, and the field at fault. */
  private void fail() throws Exception {
    Generation generation = generation().setSampling(Sampling.newBuilder().setTemperature(9)).build();
    try {
      limited().generate(GenerateRequest.newBuilder().setGeneration(generation).build());
    } catch (StatusRuntimeException error) {
      String reason = "";
      String field = "";
      for (Any detail : error.getTrailers().get(DETAILS).getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          reason = detail.unpack(ErrorInfo.class).getReason();
        } else if (detail.is(BadRequest.class)) {
          field = detail.unpack(BadRequest.class).getFieldViolations(0).getField();
        }
      }
      System.out.println("error: " + error.getStatus().getCode() + " " + reason + " " + field);
    }
  }

  /** A stream that breaks, and its rest: a request with a name can be resumed, on any gateway. */
  private void resume() throws Exception {
    String requestId = UUID.randomUUID().toString();
    StreamGenerateRequest request =
        StreamGenerateRequest.newBuilder().setGeneration(generation().setRequestId(requestId)).build();
    Context.CancellableContext call = Context.current().withCancellation();
    Chunk chunk =
        call.call(
            () -> {
              Iterator<StreamGenerateResponse> messages = limited().streamGenerate(request);
              StreamGenerateResponse message = messages.next();
              while (!message.hasChunk()) {
                message = messages.next();
              }
              return message.getChunk();
            });
    call.cancel(null);
    Position position =
        Position.newBuilder().setIndex(0).setNextOffset(chunk.getOffset() + chunk.getTokenIdsCount()).build();
    StringBuilder rest = new StringBuilder();
    ResumeRequest resume = ResumeRequest.newBuilder().setRequestId(requestId).addPositions(position).build();
    for (Iterator<ResumeResponse> messages = limited().resume(resume); messages.hasNext(); ) {
      rest.append(messages.next().getChunk().getText());
    }
    System.out.println("resumed: " + chunk.getText() + "|" + rest);
  }

  /** The service, with a deadline of one minute. */
  private InferenceServiceBlockingStub limited() {
    return service.withDeadlineAfter(60, TimeUnit.SECONDS);
  }

  /** A request for at most 16 tokens. */
  private static Generation.Builder generation() {
    return Generation.newBuilder().setText("A quire is").setStopping(Stopping.newBuilder().setMaxTokens(16));
  }
}
